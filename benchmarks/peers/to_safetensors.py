"""A GGUF file as a folder of bfloat16 safetensors with its tokenizer, by the Python of a peer with transformers.

    PEER/venv/bin/python to_safetensors.py MODEL.gguf FOLDER

The folder names no end-of-sequence token: `transformers serve` cannot be told to ignore it.
"""

import sys
from pathlib import Path


def main(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    config = type(read.config)(**{**read.config.to_dict(), "eos_token_id": None, "quantization_config": None})
    model = type(read)(config).to(torch.bfloat16)  # the one that was read counts as quantised and cannot be saved
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
