"""Between characters and token ids: tokenizer, chat template, detokenizer, stop strings."""
