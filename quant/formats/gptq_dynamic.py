"""GPTQModel's `dynamic` rules: settings of modules that a regular expression matches.

    "+:PATTERN" or "PATTERN": {"bits": 8, "group_size": 32}   in place of the config's own
    "-:PATTERN": {}                                           not quantised

The first rule whose pattern matches a beginning of a module's name counts.
"""

from collections.abc import Mapping
from typing import Any

from trtc.quant.formats.module_regexes import ModuleRegexes
from trtc.quant.formats.stored import excluded, mapping, unsupported

_FIELD = "dynamic"
_SKIP, _APPLY = "-:", "+:"
_STORED = ("bits", "sym", "group_size", "desc_act")
"""Settings that say what is stored."""
_CALIBRATED = (
    *("static_groups", "act_group_aware", "mse", "fallback", "failsafe", "hessian"),
    *("damp_percent", "damp_auto_increment", "gptaq", "foem", "v2", "v2_alpha", "smoother"),
)
"""Settings of the calibration, which is done."""


class DynamicRules:
    """The rules of a config.

    Raises:
        UnsupportedError: settings that trtc does not read, or patterns that it does not match.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._rules = mapping(config, _FIELD)
        patterns = {rule: rule.removeprefix(_SKIP).removeprefix(_APPLY) for rule in self._rules}
        self._regexes = ModuleRegexes(_FIELD, patterns, whole=False)
        for rule, settings in self._rules.items():
            if not rule.startswith(_SKIP) and not _is_known(settings):
                known = f"overrides of {', '.join(_STORED)}"
                raise unsupported(_FIELD, {rule: settings}, known)

    def overrides(self, prefix: str) -> Mapping[str, Any]:
        """Settings of a quantised module in place of the config's; empty where it has none.

        Raises:
            CheckpointError: a rule says that it is not quantised.
            UnsupportedError: the patterns take too long.
        """
        rule = self._regexes.first(prefix)
        if rule is None:
            return {}
        if rule.startswith(_SKIP):
            raise excluded(prefix)
        return {name: value for name, value in self._rules[rule].items() if name in _STORED}


def _is_known(settings: Any) -> bool:
    known = (*_STORED, *_CALIBRATED)
    return isinstance(settings, Mapping) and all(name in known for name in settings)
