"""runtime/scheduling/pace.py: prompts beside decodes are cut to what a step has time for."""

from trtc.runtime.scheduling.pace import Pace
from trtc.runtime.scheduling.scheduler import StepLimits

LIMITS = StepLimits(512)


def test_nothing_is_cut_before_a_step_was_seen() -> None:
    assert Pace(LIMITS, 0.2).limits == LIMITS


def test_a_slow_executor_gets_what_it_has_time_for() -> None:
    pace = Pace(LIMITS, 0.2)
    pace.took(512, 1, 0.8)
    assert pace.limits == StepLimits(512, max_tokens_beside_decodes=128)


def test_it_follows_a_machine_that_slows_down() -> None:
    pace = Pace(LIMITS, 0.2)
    pace.took(512, 1, 0.8)
    for _ in range(40):
        pace.took(128, 1, 0.4)
    beside = pace.limits.max_tokens_beside_decodes
    assert beside is not None and 62 <= beside <= 66


def test_a_fast_executor_is_bounded_by_its_own_limit_alone() -> None:
    pace = Pace(LIMITS, 0.2)
    pace.took(512, 1, 0.005)
    beside = pace.limits.max_tokens_beside_decodes
    assert beside is not None and beside > LIMITS.max_num_tokens


def test_a_prompt_always_advances() -> None:
    pace = Pace(LIMITS, 0.2)
    pace.took(64, 1, 1000.0)
    beside = pace.limits.max_tokens_beside_decodes
    assert beside is not None and beside >= 32


def test_steps_that_mostly_decode_say_nothing() -> None:
    """A GPU decodes 256 sequences in 12 ms, and prefills 8192 tokens in 100."""
    pace = Pace(StepLimits(8192), 0.15)
    pace.took(8192, 8, 0.1)
    learnt = pace.limits
    pace.took(256, 256, 0.012)
    pace.took(300, 257, 0.013)
    assert pace.limits == learnt
    assert learnt.max_tokens_beside_decodes is not None
    assert learnt.max_tokens_beside_decodes > 8192


def test_steps_of_few_tokens_and_no_target_say_nothing() -> None:
    for pace, tokens in ((Pace(LIMITS, 0.2), 16), (Pace(LIMITS, 0.0), 512)):
        pace.took(tokens, 1, 1.0)
        assert pace.limits == LIMITS
