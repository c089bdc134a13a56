"""Checkpoints whose tokenizer is SentencePiece's or Mistral's, not tokenizer.json."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer as FastTokenizer

from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint
from trtc.builder.checkpoint.tokenizer_conversion import with_fast_tokenizer
from trtc.protos.errors import CheckpointError
from trtc.protos.manifest import TOKENIZER_DIR, read_manifest
from trtc.quant.calibration_text import default_heldout

TEXTS = (
    "def f(x):\n    return x",
    "hello world",
    "na\u00efve \u2014 \u6f22\u5b57 \U0001f642",
    "a  b\t1234",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(str(sample)[:2000] for sample in default_heldout().samples))
    return path


@pytest.fixture(scope="module")
def sentencepiece_model(text: Path) -> Path:
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(text.parent / "bpe"),
        vocab_size=512,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return text.parent / "bpe.model"


def with_tokenizer(checkpoint: Path, output: Path, **config: object) -> Path:
    shutil.copytree(checkpoint, output)
    (output / "tokenizer_config.json").write_text(json.dumps(config))
    return output


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("weights"), vocab_size=1024)


@pytest.fixture
def llama(weights: Path, sentencepiece_model: Path, tmp_path: Path) -> Path:
    """As Llama 2 was published."""
    path = with_tokenizer(
        weights,
        tmp_path / "llama",
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
        chat_template="{{ messages[0].content }}",
    )
    shutil.copyfile(sentencepiece_model, path / "tokenizer.model")
    return path


def test_an_engine_of_a_sentencepiece_model_encodes_as_sentencepiece(
    llama: Path, sentencepiece_model: Path, tmp_path: Path
) -> None:
    build_tiny(llama, tmp_path / "engine")
    manifest = read_manifest(tmp_path / "engine")
    assert manifest.has_tokenizer and manifest.model.name == "llama"
    fast = FastTokenizer.from_file(str(tmp_path / "engine" / TOKENIZER_DIR / "tokenizer.json"))
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    for text in TEXTS:
        assert fast.encode(text, add_special_tokens=False).ids == oracle.encode(text)
        assert fast.encode(text).ids == [oracle.bos_id(), *oracle.encode(text)]
        assert fast.decode(fast.encode(text).ids) == text
    template = tmp_path / "engine" / TOKENIZER_DIR / "chat_template.jinja"
    assert template.read_text() == "{{ messages[0].content }}"


def test_tekken_is_read_as_transformers_reads_it(weights: Path, tmp_path: Path) -> None:
    pieces = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w"]
    special = ["<unk>", "<s>", "</s>", "[INST]"]
    document = {
        "config": {
            "pattern": r"\s?\w+|\s+|[^\w\s]+",
            "num_vocab_tokens": len(pieces),
            "default_vocab_size": len(pieces) + len(special),
            "default_num_special_tokens": len(special),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for rank, piece in enumerate(pieces)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(special)
        ],
    }
    model = with_tokenizer(weights, tmp_path / "mistral")
    (model / "tokenizer_config.json").unlink()
    (model / "tekken.json").write_text(json.dumps(document))
    with with_fast_tokenizer(model) as readable:
        fast = FastTokenizer.from_file(str(readable / "tokenizer.json"))
        assert readable.name == "mistral"
    ids = fast.encode("hello world", add_special_tokens=False).ids
    spelt = [b"hello", b" w", b"o", b"r", b"l", b"d"]
    assert ids == [pieces.index(piece) + len(special) for piece in spelt]
    assert fast.decode(ids) == "hello world"
    slow = transformers.AutoTokenizer.from_pretrained(model)
    assert ids == slow.encode("hello world", add_special_tokens=False)
    assert not readable.exists()


def test_a_tokenizer_that_cannot_be_converted_is_refused_before_the_work(
    llama: Path, tmp_path: Path
) -> None:
    (llama / "tokenizer.model").write_bytes(b"\x00garbage" * 100)
    with pytest.raises(CheckpointError, match=r"tokenizer.model: cannot be converted"):
        build_tiny(llama, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_a_model_with_tokenizer_json_is_read_where_it_lies(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    with with_fast_tokenizer(llama) as readable:
        assert readable == llama
