"""Tasks of lm-evaluation-harness, by name, and their evaluation."""

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from trtc.commands.harness.engine_lm import EngineLM
from trtc.protos.errors import EnvironmentFault, RequestError, UnsupportedError

_NAMED = 3
"""Names in a message, at most."""
_RESULTS = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better")
_SAMPLES = ("configs", "samples")


@dataclass(frozen=True)
class Tasks:
    """What is evaluated, and how."""

    names: tuple[str, ...]
    """Of tasks, groups and tags."""
    include_path: Path | None = None
    """Directory with tasks in YAML files; they may name Python functions, which are run."""
    num_fewshot: int | None = None
    """Answered examples before each question; None: as the task has it."""
    limit: int | None = None
    """Questions of a task, the first ones; None: all."""
    applies_chat_template: bool = False
    """Whether prompts are conversations that the model's chat template writes."""


def load_tasks(tasks: Tasks) -> dict[str, Any]:
    """Load tasks and their data, of which lm-eval's own are on the Hugging Face hub.

    Raises:
        RequestError: a name that no task has; tasks that contradict each other.
        UnsupportedError: a task that runs what the model writes.
        EnvironmentFault: data that cannot be read or downloaded.
    """
    manager = _manager(tasks)
    try:
        loaded: dict[str, Any] = manager.load(list(tasks.names))
    except OSError as error:
        raise EnvironmentFault(
            f"data cannot be read ({error})",
            field="--tasks",
            remedy="Check its path, or connect to the hub: most tasks are downloaded once",
        ) from error
    except ValueError as error:
        raise RequestError(str(error), field="--tasks") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UnsupportedError(
                "runs what the model writes",
                field=f"--tasks: {name}",
                remedy="Run lm-eval itself, in a sandbox, against trtc serve",
            )
        if tasks.num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=tasks.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def _manager(tasks: Tasks) -> Any:
    """One that knows all names; those of lm-eval are read only if they are needed: it has 14,000
    files of tasks, which take half a minute."""
    if tasks.include_path is not None:
        own = TaskManager(include_path=str(tasks.include_path), include_defaults=False)
        if set(tasks.names) <= set(own.all_subtasks):
            return own
    manager = TaskManager(include_path=tasks.include_path and str(tasks.include_path))
    for name in tasks.names:
        if name not in manager.all_tasks:
            raise RequestError(
                f"{name!r} is no task", field="--tasks", remedy=_nearest(name, manager.all_tasks)
            )
    return manager


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, _NAMED)
    return f"Did you mean {', '.join(near)}?" if near else "`lm-eval ls tasks` lists them"


def evaluate_tasks(
    model: EngineLM, tasks: Tasks, loaded: dict[str, Any], *, keeps_samples: bool = False
) -> dict[str, Any]:
    """Metrics by task and group, with standard errors, in the form of lm-eval's results.

    Args:
        loaded: from `load_tasks`.
        keeps_samples: whether each question is there too, with what the model was given and said.
    """
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    found = evaluate(
        lm=model,
        task_dict=loaded,
        limit=tasks.limit,
        log_samples=keeps_samples,
        apply_chat_template=tasks.applies_chat_template,
        fewshot_as_multiturn=tasks.applies_chat_template,
    )
    kept = (*_RESULTS, *(_SAMPLES if keeps_samples else ()))
    return {name: found[name] for name in kept if found.get(name)}


def tables(results: dict[str, Any]) -> str:
    """Markdown tables as lm-eval prints them, of tasks and of groups."""
    columns = [name for name in ("results", "groups") if results.get(name)]
    return "\n".join(make_table(results, name) for name in columns)
