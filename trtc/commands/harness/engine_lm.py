"""An engine in this process as a model of lm-evaluation-harness.

    loglikelihood           log-probabilities of a continuation, of those of the whole prompt
    loglikelihood_rolling   the same of a text, in windows of what the engine takes
    generate_until          a completion, greedy unless the task samples

Texts are tokenised, cut and scored as by lm-eval's own model `hf`, so that results can be compared.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from trtc.protos.errors import InvalidRequestError, NoTokenizerError, RequestError, UnsupportedError
from trtc.protos.progress import Progress, counted
from trtc.protos.sampling import SamplingOptions
from trtc.runtime.frontends.local import LocalEngine, LocalGeneration
from trtc.runtime.requests.completion import Result
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.text.chat_options import chat_of

_NEW_TOKENS = 256
"""Of a completion, for tasks that do not say: lm-eval's own default."""
_SEED = 1234
"""Of the first completion that is drawn, for tasks that sample; lm-eval's own."""
_AHEAD, _MOST_AHEAD = 4, 1024
"""Requests that are running or wait, so that no step waits for one: so many batches of the engine,
and at most so many, as its queue takes no more."""


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm-eval is not always installed
    """An engine with a tokenizer.

    Requests of a method run together, as many as the engine batches. Prompts that are too long for
    it lose tokens at their beginning.

    Args:
        engine: stays open as long as this is used.
        progress: is told of each request that has ended.

    Raises:
        NoTokenizerError: the engine takes token ids only.
    """

    def __init__(self, engine: LocalEngine, progress: Progress) -> None:
        super().__init__()
        if engine.tokenizer is None:
            raise NoTokenizerError("has no tokenizer, and tasks are texts", field="--tasks")
        self._engine = engine
        self._text = engine.tokenizer
        self._progress = progress
        self.num_cut = 0
        """Prompts that were too long, so far."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its completion."""
        return self._engine.manifest.limits.max_seq_len

    @property
    def eot_token_id(self) -> int:
        """The first of the model's end-of-sequence tokens.

        Raises:
            UnsupportedError: it has none.
        """
        ids = self._engine.manifest.model.eos_token_ids
        if not ids:
            raise UnsupportedError(
                "no token begins or ends a text of this model, and the first needs one before it",
                field="--tasks",
            )
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that is scored from its first token."""
        begin = self._engine.manifest.model.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self._engine.manifest.digest

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation, without its system message where the template has none.

        Raises:
            InvalidRequestError: the template refuses it.
            NoTokenizerError: the model has no chat template.
        """
        others = [one for one in chat_history if one["role"] != "system"]
        try:
            return self._rendered(chat_history, add_generation_prompt)
        except InvalidRequestError:
            if len(others) == len(chat_history):
                raise
            return self._rendered(others, add_generation_prompt)

    def _rendered(self, messages: Sequence[Mapping[str, str]], adds_prompt: bool) -> str:
        said = [{"role": one["role"], "content": one["content"]} for one in messages]
        chat = chat_of(
            said,
            {"add_generation_prompt": adds_prompt, "continue_final_message": not adds_prompt},
        )
        return self._text.apply_chat_template(chat.template_input())

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any
    ) -> list[int]:
        """Token ids; None: with special tokens, unless the text begins with the prefix's."""
        if add_special_tokens is None:
            prefix = self._text.decode((self.prefix_token_id,), skip_special=False)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return list(self._text.encode(string, add_special_tokens))

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._scored_length - 1,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    @property
    def _scored_length(self) -> int:
        """Tokens of a prompt whose log-probabilities are asked for: one is drawn after it."""
        return self.max_length - 1

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Sum of the continuation's log-probabilities, in nats, and whether each of its tokens is
        the likeliest.

        Args:
            requests: (text, token ids of the context, of the continuation); a context has one.

        Raises:
            RequestError: a continuation is longer than the engine's sequences.
        """
        inputs = [self._scored(context, continuation) for _, context, continuation in requests]
        lengths = [len(continuation) for _, _, continuation in requests]
        answers = []
        for result, length in zip(self._results(inputs, "scoring"), lengths, strict=True):
            scored = result.prompt_logprobs[len(result.prompt_logprobs) - length :]
            is_greedy = all(one.top[0][0] == one.token_id for one in scored)
            answers.append((sum(one.logprob for one in scored), is_greedy))
        return answers

    def _scored(self, context: list[int], continuation: list[int]) -> RequestInput:
        self._check_room("a text to score", len(continuation), self._scored_length)
        prompt = self._cut([*context, *continuation], self._scored_length)
        return RequestInput(
            token_ids=prompt, max_tokens=1, prompt_logprobs=1, sampling={"temperature": 0.0}
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Completions, without what ended them.

        Raises:
            UnsupportedError: a task asks for what the engine's sampling does not have.
            RequestError: a task asks for longer completions than the engine's sequences.
        """
        inputs = [
            self._completed(*request.args, seed=_SEED + number)
            for number, request in enumerate(requests)
        ]
        return [result.text for result in self._results(inputs, "generating")]

    def _completed(self, context: str, asked: Mapping[str, Any], *, seed: int) -> RequestInput:
        """
        Args:
            seed: of its own, as tasks ask several times for samples of one prompt.
        """
        options = dict(normalize_gen_kwargs(dict(asked), _NEW_TOKENS))
        options.pop("do_sample")
        stop = tuple(text for text in options.pop("until") if text)
        max_tokens = options.pop("max_gen_toks")
        if unknown := sorted(options.keys() - SamplingOptions.__annotations__.keys()):
            raise UnsupportedError(
                "is no parameter of an engine's sampling",
                field=f"--tasks: generation_kwargs: {unknown[0]}",
                remedy="Leave it out of the task",
            )
        self._check_room("a completion", max_tokens, self.max_length)
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        return RequestInput(
            token_ids=self._cut(prompt, self.max_length - max_tokens),
            max_tokens=max_tokens,
            stop=stop,
            sampling={"temperature": 0.0, "seed": seed, **options},  # type: ignore[typeddict-item]
        )

    def _check_room(self, what: str, length: int, longest: int) -> None:
        if length >= longest:
            raise RequestError(
                f"{what} has {length} tokens, and the engine's sequences {self.max_length}",
                field="--tasks",
                remedy="Build the engine with a larger --max-seq-len",
            )

    def _cut(self, prompt: list[int], length: int) -> tuple[int, ...]:
        self.num_cut += len(prompt) > length
        return tuple(prompt[-length:])

    def _results(self, inputs: Sequence[RequestInput], phase: str) -> Iterator[Result]:
        """Results in the order of the inputs, which run together."""
        return counted(self._in_order(inputs), phase, len(inputs), "requests", self._progress)

    def _in_order(self, inputs: Sequence[RequestInput]) -> Iterator[Result]:
        ahead = min(_AHEAD * self._engine.manifest.limits.max_batch_size, _MOST_AHEAD)
        running: deque[LocalGeneration] = deque()
        for request_input in inputs:
            running.append(self._engine.submit(request_input))
            if len(running) == ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
