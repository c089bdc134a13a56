"""The command line's surface, flag by flag: adding one is a decision, losing one is a break."""

import click
import pytest

from trtc.cli import SUBCOMMANDS, cli

COMPLETION = """
    --prompt --raw --prompt-file --prompt-ids --chat --system
    --messages --tools --chat-template-kwargs --max-tokens --temperature --top-k
    --top-p --min-p --repetition-penalty --presence-penalty --frequency-penalty --logit-bias --seed
    --stop --stop-token-ids --include-stop --ignore-eos --min-tokens --n --logprobs
    --prompt-logprobs --json-schema --regex --choice --grammar --structural-tag
    --grammar-name --json
"""

TALK = """
    name --system --max-tokens --temperature --top-k --top-p --min-p --repetition-penalty
    --presence-penalty --frequency-penalty --seed --url --tls --tls-ca --tls-cert --tls-key
    --api-key-file --threads --kv-bytes
"""

FLAGS = {
    "build": """
        --model --revision --output --dry-run --dtype --kv-dtype --target --force --calib --keep
        --eval-text
        --eval-tokens --recipe --max-bits --max-bytes
        --max-kl --reference --exact-activations --exact-lm-head --lm-head-dtype
        --embedding-dtype --exact-weights --dummy-weights
        --max-batch-size
        --max-seq-len --max-num-tokens --page-size --format --grammar --tp --ep --family --threads
        --json
    """,
    "families": "--json",
    "compile": "bundle --strip --alias-pools --json",
    "quantize": """
        --model --revision --output --dtype --kv-dtype --calib --keep --recipe --force --json
    """,
    "compare": "first second --text --max-tokens --threads --page --json",
    "eval": """
        engine --text --reference --max-tokens --window --tasks --include-path --num-fewshot
        --limit --apply-chat-template --output --threads --json
    """,
    "tune": "engine --dummy-weights --json",
    "package": "engines output --format --name --version --force --json",
    "sign": "engine --key",
    "verify": "engine --trust --json",
    "inspect": "engine --plan --json --verify",
    "generate": f"engine {COMPLETION} --threads --kv-bytes --dummy-weights --generation-config",
    "chat": f"{TALK} --no-history",
    "run": f"{TALK} prompt",
    "serve": """
        engines --models --poll --explicit --load
        --host --grpc-port --http-port --no-http --cors-origin --no-page --threads
        --kv-bytes --kv-host-bytes
        --step-target --digest --require-signature --trust
        --max-queue --max-streams --max-connection-streams --max-connections
        --max-request-bytes --max-prompt-bytes --max-priority --share-prefixes --no-prefix-cache
        --draft --draft-tokens
        --dummy-weights --generation-config --drain-timeout
        --tls-cert --tls-key --tls-client-ca --api-keys --allow-anonymous
        --audit-log --audit-content --audit-max-bytes --audit-keep
        --hooks --hook-timeout --hook-processes
        --kv-events --kv-events-replay --kv-events-topic --kv-events-format
        --kv-events-grpc
        --otlp-endpoint --metrics-compat --log-level
    """,
    "keys": "file --add --scope --expires-days --revoke",
    "client": f"""
        --host --port --model {COMPLETION} --priority --timeout --tls --tls-ca --tls-cert --tls-key
        --api-key-file
    """,
    "bench": """
        engine --url --model --concurrency --rate --input-len --output-len --requests --warmup
        --seed --tls --tls-ca --tls-cert --tls-key --api-key-file --threads --kv-bytes
        --dummy-weights --json
    """,
    "doctor": "--json",
}


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_the_flags_of_a_command_are_these(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    found = [parameter.opts[0] for parameter in command.params]
    assert sorted(found) == sorted(FLAGS[name].split())


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_every_option_is_explained(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            shown = parameter.help or parameter.show_default
            assert shown, f"trtc {name} {parameter.opts[0]} has neither help nor default"


def test_the_subcommands_are_these() -> None:
    assert set(SUBCOMMANDS) == set(FLAGS)
