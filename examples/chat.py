"""A chat, whole and streamed, through the official client: ``pip install openai``, ``octavo serve``, run this."""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OCTAVO_URL", "http://127.0.0.1:8000") + "/v1", api_key="not needed")
model = client.models.list().data[0].id
messages = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0)
print(answer.choices[0].message.content)
print(f"({answer.usage.prompt_tokens} prompt tokens, {answer.usage.completion_tokens} new ones)\n")

# The same prompt again: its KV is cached, so only the last of its tokens is computed.
stream = client.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n({chunk.usage.prompt_tokens_details.cached_tokens} prompt tokens came from the cache)")
