"""From an engine directory to a running engine loop."""

from trtc.runtime.loop import EngineLoop, LoopConfig
from trtc.runtime.server.app import EngineSource, ServerConfig
from trtc.runtime.server.handle import EngineHandle
from trtc.runtime.session import open_session


def open_handle(source: EngineSource, config: ServerConfig) -> EngineHandle:
    """Verify, map and start one engine.

    Raises:
        EngineError: the directory is damaged, or not for this machine.
    """
    session = open_session(
        source.path,
        num_threads=config.num_threads,
        kv_bytes=config.kv_bytes,
        dummy_weights=config.dummy_weights,
    )
    loop = EngineLoop(
        session.executor,
        session.tokenizer,
        LoopConfig(
            eos_token_ids=session.manifest.model.eos_token_ids,
            max_queue=config.max_queue,
            prefix_cache=config.prefix_cache,
            step_target_s=config.step_target_s,
        ),
    )
    loop.start()
    return EngineHandle(
        name=source.name,
        manifest=session.manifest,
        tokenizer=session.tokenizer,
        num_pages=session.executor.num_pages,
        loop=loop,
        close=session.close,
    )
