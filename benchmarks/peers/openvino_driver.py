"""OpenVINO GenAI has no server: this drives its continuous batching in process, as the load client drives the others.

Run by the Python of OpenVINO's own environment. One workload per line of standard input (the fields of ``Workload``,
and a seed), one line of JSON on standard output for each: requests with the times of their tokens. There is no HTTP,
no tokenizer and no other process: what it measures is what a server on top of it could at best reach.
"""

import json
import os
import random
import sys
import time
from typing import Any

#: As for the other contenders: ids that are ordinary tokens in nearly every vocabulary.
ID_RANGE = (1000, 30_000)
CACHE_GB = 2


class Drive:
    """One workload on one pipeline: closed-loop clients, and long prompts that arrive at their times."""

    def __init__(self, pipeline: Any, api: Any, job: dict[str, Any]) -> None:
        self._pipeline, self._api, self._job = pipeline, api, job
        self._random = random.Random(job["seed"])
        self._prefix = self._ids(job["shared_prefix"])
        self._asked = self._long_asked = 0
        self._active: list[tuple[dict[str, Any], Any]] = []
        self.requests: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """A request to warm up, which is not counted, then until every request has been answered."""
        self._zero = time.perf_counter()
        self._ask("warm-up", 0.0, self._prefix + self._ids(self._job["prompt_tokens"]), output_tokens=1)
        while self._active:
            self._pipeline.step()
            self._read()
        self.requests.clear()
        self._zero = time.perf_counter()
        while self._fill():
            if not self._active:  # all that is left is to come
                time.sleep(0.001)
                continue
            self._pipeline.step()
            self._read()
        return {"duration_s": self._now(), "requests": self.requests}

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(*ID_RANGE) for _ in range(count)]

    def _fill(self) -> bool:
        """Ask what is due. False once nothing is under way or to come."""
        job = self._job
        while self._long_asked < job["long_prompts"] and self._now() >= (self._long_asked + 1) * job["long_every_s"]:
            arrival_s = (self._long_asked + 1) * job["long_every_s"]
            self._ask("long", arrival_s, self._ids(job["long_tokens"]), output_tokens=1)
            self._long_asked += 1
        chats = sum(request["group"] == "chat" for request, _ in self._active)
        while chats < job["concurrency"] and self._may_ask():
            ids = self._prefix + self._ids(job["prompt_tokens"])
            self._ask("chat", self._now(), ids, output_tokens=job["output_tokens"])
            self._asked += 1
            chats += 1
        return bool(self._active) or self._long_asked < job["long_prompts"]

    def _may_ask(self) -> bool:
        job = self._job
        if not job["long_prompts"]:
            return bool(self._asked < job["requests"])
        waiting = any(request["group"] == "long" for request, _ in self._active)
        return waiting or self._long_asked < job["long_prompts"]

    def _ask(self, group: str, arrival_s: float, ids: list[int], *, output_tokens: int) -> None:
        import numpy as np

        request = {"group": group, "prompt_tokens": len(ids), "asked_output_tokens": output_tokens}
        request |= {"arrival_s": arrival_s, "event_times_s": [], "output_tokens": 0, "failure": None}
        self.requests.append(request)
        config = self._api.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
        tensor = self._api.Tensor(np.array([ids], dtype=np.int64))
        self._active.append((request, self._pipeline.add_request(len(self.requests), tensor, config)))

    def _read(self) -> None:
        now_s, status = self._now(), self._api.GenerationStatus
        still = []
        for request, handle in self._active:
            if handle.can_read():
                request["output_tokens"] += sum(len(output.generated_ids) for output in handle.read().values())
                request["event_times_s"].append(now_s)
            if handle.get_status() == status.RUNNING:
                still.append((request, handle))
                continue
            request["end_s"] = now_s
            if request["output_tokens"] < request["asked_output_tokens"]:
                request["failure"] = f"short: {request['output_tokens']} tokens, {handle.get_status().name}"
        self._active = still


def main(model: str, threads: int) -> None:
    """Serve jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints is no answer
    import openvino_genai as api  # type: ignore[import-not-found]
    from openvino import Tensor  # type: ignore[import-not-found]

    api.Tensor = Tensor
    scheduler = api.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = True
    pipeline = api.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(Drive(pipeline, api, json.loads(line)).run()), file=answers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
