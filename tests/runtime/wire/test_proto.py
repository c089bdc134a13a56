"""The wire contract: fields keep their numbers, and the Python code is that of the .proto."""

import re
import shutil
from pathlib import Path

import trtc.protos
from trtc.protos.generate import generate
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.wire import methods

PROTOS = Path(trtc.protos.__file__).parent

FIELDS = {
    "TokenIds": "ids=1",
    "ContentPart": "type=1 text=2",
    "FunctionCall": "name=1 arguments=2",
    "ToolCall": "id=1 type=2 function=3",
    "ChatMessage": """
        role=1 content=2 parts=3 name=4 tool_calls=5 tool_call_id=6 reasoning_content=7
    """,
    "ChatMessages": """
        messages=1 tools=2 documents=3 template_kwargs=4 add_generation_prompt=5
        continue_final_message=6
    """,
    "SamplingParams": """
        temperature=1 top_k=2 top_p=3 min_p=4 repetition_penalty=5 presence_penalty=6
        frequency_penalty=7 logit_bias=8 seed=9
    """,
    "Grammar": "json_schema=1 json_object=2 regex=3 choice=4 lark=5 structural_tag=6 named=7",
    "Texts": "texts=1",
    "ToolChoice": "mode=1 names=2",
    "GenerateRequest": """
        model=1 request_id=2 text=3 token_ids=4 chat=5 sampling=6 max_tokens=7 stop=8
        stop_token_ids=9 ignore_eos=10 n=11 logprobs=12 priority=13 include_stop=14
        min_tokens=15 cache_salt=16 prompt_logprobs=17 grammar=18
        tool_choice=19 parallel_tool_calls=20 thinking_token_budget=21 splits_answer=22
    """,
    "TokenLogprob": "token_id=1 logprob=2 utf8=3",
    "TokenLogprobs": "sampled=1 top=2",
    "Usage": "prompt_tokens=1 cached_prompt_tokens=2 completion_tokens=3 reasoning_tokens=4",
    "AnswerPart": "text=1 reasoning=2 call=3",
    "AnswerCall": "index=1 id=2 name=3 arguments=4",
    "Finished": "reason=1 matched_stop=2",
    "GenerateResponse": """
        request_id=1 index=2 text=3 token_ids=4 logprobs=5 finished=6 usage=7 prompt_logprobs=8
        parts=9
    """,
    "AbortRequest": "model=1 request_id=2",
    "AbortResponse": "",
    "TokenizeRequest": "model=1 text=2 chat=3 add_special_tokens=4",
    "TokenizeResponse": "token_ids=1",
    "DetokenizeRequest": "model=1 token_ids=2 keep_special_tokens=3",
    "DetokenizeResponse": "text=1",
    "GetModelInfoRequest": "model=1",
    "ModelInfo": """
        name=1 family=2 scheme=3 kv_dtype=4 target=5 vocab_size=6 max_seq_len=7 max_batch_size=8
        max_num_tokens=9 has_tokenizer=10 has_chat_template=11 eos_token_ids=12 page_size=13
        num_pages=14 engine_digest=15 trtc_version=16 sampling_defaults=17 default_max_tokens=18
        grammars=19
    """,
    "GetModelInfoResponse": "models=1",
}


def test_the_method_table_is_the_service() -> None:
    service = pb.DESCRIPTOR.services_by_name["Inference"]
    assert service.full_name == methods.SERVICE
    table = {
        one.name: one
        for one in (
            methods.GENERATE,
            methods.ABORT,
            methods.TOKENIZE,
            methods.DETOKENIZE,
            methods.GET_MODEL_INFO,
        )
    }
    assert set(table) == set(service.methods_by_name)
    for name, method in service.methods_by_name.items():
        assert table[name].request.DESCRIPTOR is method.input_type
        assert table[name].response.DESCRIPTOR is method.output_type
        assert method.server_streaming == (name == "Generate")
        assert not method.client_streaming


def test_messages_and_field_numbers_are_these() -> None:
    found = {
        name: [f"{field.name}={field.number}" for field in message.fields]
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert found == {name: fields.split() for name, fields in FIELDS.items()}


def test_the_messages_are_generated_from_the_proto(tmp_path: Path) -> None:
    shutil.copytree(PROTOS / "trtc", tmp_path / "trtc", ignore=shutil.ignore_patterns("*_pb2*"))
    generate(tmp_path)
    for path in sorted((tmp_path / "trtc" / "v1").glob("*_pb2*")):
        committed = PROTOS / "trtc" / "v1" / path.name
        assert _without_versions(path) == _without_versions(committed), (
            f"{path.name} is not what the .proto gives: run `make proto`"
        )


def _without_versions(path: Path) -> str:
    """A newer generator writes its own version, and may otherwise write the same."""
    return re.sub(r"\d+\.\d+\.\d+|^ +\d+,$", "", path.read_text(), flags=re.M)
