"""How likely is a text? Scores a prompt without generating, and shows what the model expected instead."""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OCTAVO_URL", "http://127.0.0.1:8000") + "/v1", api_key="not needed")
model = client.models.list().data[0].id

answer = client.completions.create(
    model=model, prompt="The capital of France is Paris.", echo=True, max_tokens=0, logprobs=3
)
logprobs = answer.choices[0].logprobs
for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
    if logprob is None:
        print(f"{token!r:>12}")  # nothing comes before the first token
    else:
        others = ", ".join(f"{name!r} {value:.2f}" for name, value in top.items() if name != token)
        print(f"{token!r:>12} {logprob:7.2f}   rather: {others}")
