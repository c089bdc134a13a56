"""Any body becomes a request input or an error of the request: nothing else is raised."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.tgi.fields import GenerateFields, Parameters
from trtc.runtime.frontends.http.tgi.request_inputs import read_generate, request_input

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(GenerateFields.__struct_fields__)
PARAMETERS = st.sampled_from(sorted({*Parameters.__struct_fields__, *Parameters.refused}))


@settings(max_examples=300, deadline=None)
@given(
    document=st.dictionaries(FIELDS, VALUES),
    parameters=st.none() | st.dictionaries(PARAMETERS, VALUES, max_size=4),
    inputs=st.none() | st.text(),
    stream=st.booleans(),
)
def test_any_body_becomes_a_draft_or_an_error(
    document: dict[str, object],
    parameters: dict[str, object] | None,
    inputs: str | None,
    stream: bool,
) -> None:
    document = {**document, **({"inputs": inputs, "parameters": parameters} if inputs else {})}
    try:
        made = request_input(read_generate(json.dumps(document).encode()), "id", stream=stream)
    except InvalidRequestError as error:
        assert error.remedy
        return
    assert made.text == document["inputs"]
