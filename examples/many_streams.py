"""Eight streams at once, three answers each from one prompt, with sampling parameters that OpenAI does not have."""

from __future__ import annotations

import asyncio
import os

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, model: str, topic: str) -> list[str]:
    """Three different answers; the prompt is computed once for all of them."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"One sentence about {topic}."}],
        n=3,
        seed=7,
        max_tokens=32,
        stream=True,
        extra_body={"min_p": 0.05, "repetition_penalty": 1.1},
    )
    answers = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            answers[choice.index] += choice.delta.content or ""
    return answers


async def main() -> None:
    """All topics at the same time."""
    url = os.environ.get("OCTAVO_URL", "http://127.0.0.1:8000")
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="not needed") as client:
        model = (await client.models.list()).data[0].id
        topics = ["rain", "rivers", "bread", "bees", "Venus", "violins", "chess", "clocks"]
        for topic, answers in zip(topics, await asyncio.gather(*(ask(client, model, t) for t in topics)), strict=True):
            print(f"\n{topic}")
            for answer in answers:
                print(f"  - {answer.strip()}")


asyncio.run(main())
