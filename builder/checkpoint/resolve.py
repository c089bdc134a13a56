"""Finds a model's directory: a path, else a name on the Hugging Face hub."""

import re
from pathlib import Path

from trtc.protos.errors import CheckpointError, RequestError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ("*.json", "*.jinja", "tokenizer.model", "*.safetensors")
"""Never pickles, never code."""
_UNWANTED = ("consolidated*", "original/*")
"""A second copy of the weights, in the layout of the model's own code."""


def resolve_model(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The directory of `model`: a local one first, else the hub's, downloaded or from its cache.

    Args:
        model: path, or `owner/name` on the hub.
        revision: branch, tag or commit on the hub.
        weights: False fetches only the configuration (--dummy-weights).

    Raises:
        RequestError: a revision of a directory.
        CheckpointError: neither a directory nor a name that the hub or its cache has.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise RequestError(
                f"is {revision!r}, and {model} is a directory",
                field="--revision",
                remedy="Leave it out, or give a name on the Hugging Face hub",
            )
        return path
    if path.exists():
        raise CheckpointError(
            "is a file",
            field=f"--model {model}",
            remedy="Give the directory that holds config.json",
        )
    if not _HUB_NAME.fullmatch(model):
        raise CheckpointError(
            "there is no such directory",
            field=f"--model {model}",
            remedy="Give a model directory, or owner/name of a model on the Hugging Face hub",
        )
    return _download(model, revision, _WANTED if weights else _WANTED[:-1])


def hub_commit(directory: Path) -> str | None:
    """The commit that a directory of the hub's cache holds; None: it is another directory."""
    return directory.name if directory.parent.name == "snapshots" else None


def model_name(directory: Path) -> str:
    """Of the directory, or of the model on the hub: a snapshot in the hub's cache lies in a folder
    named after its commit."""
    resolved = directory.resolve()
    repository = resolved.parent.parent.name
    if hub_commit(resolved) is None or not repository.startswith("models--"):
        return resolved.name
    return repository.rpartition("--")[2]  # models--owner--name


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise CheckpointError(
            "there is no such directory, and huggingface_hub is not installed to look for it",
            field=f"--model {name}",
            remedy="Give a model directory, or install trtc[build]",
        ) from error
    field = f"--model {name}"
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_UNWANTED),
            )
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            "the hub asks for an accepted licence and a login",
            field=field,
            remedy="Accept it on the model's page, run `hf auth login`, and try again",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"the hub has no revision {revision!r}", field=field) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            "there is no such directory, and the hub has no such model (or it is private)",
            field=field,
            remedy="Check the spelling; for a private model run `hf auth login`",
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            "there is no such directory, and it is not a name that the hub allows",
            field=field,
            remedy="Give a model directory, or owner/name",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError) as error:
        raise CheckpointError(
            "there is no such directory, the hub cannot be reached, and its cache on this machine "
            "does not have the model",
            field=field,
            remedy="Connect to the network (HF_HUB_OFFLINE must not be 1; HF_ENDPOINT names a "
            f"mirror), or download it elsewhere with `hf download {name}` and give the directory",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"the download could not be stored ({error.strerror or error})",
            field=field,
            remedy="Free space, or point HF_HOME at a disk that has some",
        ) from error
