"""From an engine directory to a running engine loop."""

from typing import TYPE_CHECKING

from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.engine.loop import EngineLoop, LoopConfig
from trtc.runtime.engine.session import Session, open_session
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.grammar.stored import named_grammars
from trtc.runtime.requests.request_defaults import request_defaults

if TYPE_CHECKING:
    from trtc.runtime.engine.config import EngineConfig, EngineSource


def open_handle(source: "EngineSource", config: "EngineConfig") -> EngineHandle:
    """Verify, map and start one engine.

    Raises:
        EngineError: the engine is damaged, not for this machine, or not trusted.
    """
    digest = source.digest
    if config.trust is not None:
        from trtc.runtime.integrity.signature import signed_manifest, trusted_keys

        signed = signed_manifest(source.path, trusted_keys(config.trust))
        digest = digest or signed.digest
    session = open_session(
        source.path,
        num_threads=config.num_threads,
        kv_bytes=config.kv_bytes,
        dummy_weights=config.dummy_weights,
        digest=digest,
        weights=source.weights,
    )
    loop_config = LoopConfig(
        eos_token_ids=session.manifest.model.eos_token_ids,
        defaults=request_defaults(session.manifest.model, config.generation_config),
        max_queue=config.max_queue,
        prefix_cache=config.prefix_cache,
        kv_host_bytes=config.kv_host_bytes,
        kv_events=config.kv_events,
        step_target_s=config.step_target_s,
        drafts=config.drafts,
    )
    return start(session, source.name, loop_config, source.version)


def start(session: Session, name: str, config: LoopConfig, version: str = "1") -> EngineHandle:
    """Start the loop of an opened engine.

    Raises:
        RequestError, UnsupportedError, EnvironmentFault: the config is not possible; the session
            has been closed.
    """
    try:
        loop = EngineLoop(session.executor, session.tokenizer, config)
    except BaseException:
        session.close()
        raise
    loop.start()
    model = session.manifest.model
    grammars = Grammars(
        session.tokenizer,
        model.vocab_size,
        model.eos_token_ids,
        named_grammars(session.grammars),
    )
    grammars.prepare(name)

    def close() -> None:
        grammars.close()
        session.close()

    return EngineHandle(
        name=name,
        manifest=session.manifest,
        tokenizer=session.tokenizer,
        num_pages=session.executor.num_pages,
        loop=loop,
        grammars=grammars,
        close=close,
        version=version,
        keep_weights=session.keep_weights if session.executor.keeps_weights else None,
        raise_if_changed=session.raise_if_changed,
    )
