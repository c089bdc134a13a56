"""llama.cpp's own converter, told which pre-tokeniser the bundled tokenizer has, and that no layers
predict further tokens (MTP).

    python gguf_convert.py LLAMA_CPP_SOURCE [arguments of convert_hf_to_gguf.py]

The converter knows published tokenizers by a hash of what they make of a test string, and refuses
others. The bundled one splits as GPT-2's does.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    source = Path(sys.argv[1])
    sys.path.insert(0, str(source))
    from conversion.base import ModelBase, TextModel

    ModelBase.no_mtp = True
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    script = source / "convert_hf_to_gguf.py"
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
