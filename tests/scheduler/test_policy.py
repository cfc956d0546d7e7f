"""Order and fairness, on a synthetic clock: every step lasts 10 ms."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from octavo.core.plan import SampledToken, StepResult
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.chunk_sizer import FixedChunkSizer
from octavo.scheduler.policy import FairPolicy, FcfsPolicy, PriorityPolicy, QueuePolicy, make_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence

STEP_S = 0.01
TOKEN = SampledToken(token_id=1)


@dataclass
class Office:
    """A scheduler with ``slots`` sequences at once, and when each request came, began and ended."""

    policy: QueuePolicy
    slots: int = 4
    num_blocks: int = 5_000
    now: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    began: dict[str, float] = field(default_factory=dict)
    came: dict[str, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)  # tokens per client
    clients: dict[str, str] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        manager = KVCacheManager(self.num_blocks, 16)
        self.scheduler = Scheduler(
            manager, policy=self.policy, sizer=FixedChunkSizer(256), max_num_seqs=self.slots, max_num_batched_tokens=512
        )

    def add(
        self,
        request_id: str,
        prompt_len: int = 20,
        max_tokens: int = 10,
        *,
        priority: int = 0,
        client: str = "",
        stops: bool = False,
    ) -> None:
        """stops: it ends with its first token."""
        self.came[request_id] = self.now
        self.clients[request_id] = client
        self.scheduler.add(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(self.rng.randrange(50_000) for _ in range(prompt_len)),
                sampling=SamplingParams(),
                max_tokens=max_tokens,
                stop_token_ids=frozenset({TOKEN.token_id} if stops else ()),
                seed=0,
                arrival_s=self.now,
                priority=priority,
                client=client,
            )
        )

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        for admission in plan.admitted:
            self.began.setdefault(admission.request_id, self.now)
            self.order.append(admission.request_id)
        self.preempted += plan.preempted
        for chunk in plan.chunks:
            client = self.clients[chunk.request_id]
            self.served[client] = self.served.get(client, 0) + len(chunk.token_ids)
        tokens = tuple((TOKEN,) if chunk.draw else () for chunk in plan.chunks)
        self.scheduler.apply(plan, StepResult(step_id=plan.step_id, tokens=tokens))
        self.now += STEP_S

    def waited(self, request_id: str) -> float:
        return self.began.get(request_id, self.now) - self.came[request_id]


def sequence(name: str, *, arrival_s: float = 0.0, priority: int = 0, client: str = "") -> Sequence:
    return Sequence(
        Request(
            request_id=name,
            prompt_token_ids=(1,),
            sampling=SamplingParams(),
            max_tokens=1,
            stop_token_ids=frozenset(),
            seed=0,
            arrival_s=arrival_s,
            priority=priority,
            client=client,
        )
    )


def test_first_come_is_first_served() -> None:
    office = Office(FcfsPolicy(), slots=2)
    for i in range(10):
        office.add(f"r{i}", prompt_len=1 + (7 * i) % 50)
    while office.scheduler.has_unfinished:
        office.step()
    assert office.order == [f"r{i}" for i in range(10)]


def test_the_lower_number_runs_first() -> None:
    office = Office(PriorityPolicy(aging_s=10.0), slots=1)
    for name, priority in (("running", 0), ("late", 5), ("soon", 1), ("now", -3)):
        office.add(name, priority=priority)
        office.step()
    while office.scheduler.has_unfinished:
        office.step()
    assert office.order == ["running", "now", "soon", "late"]


def test_no_priority_waits_longer_than_its_levels_allow() -> None:
    """A flood of urgent requests; now and then a request that nobody calls urgent.

    Its bound: it is overtaken only by what arrives within levels x aging_s, so it waits for that long, plus what is
    then ahead of it in the queue.
    """
    aging_s, levels = 0.5, 4
    office = Office(PriorityPolicy(aging_s), slots=4)
    per_request_s = 10 * STEP_S / office.slots  # each holds a slot for 10 steps
    for i in range(1_000):
        if i % 3 == 0:  # 33 requests per second, of 40 that can be served
            office.add(f"urgent {i}", priority=0)
        if i % 100 == 0:
            office.add(f"patient {i}", priority=levels)
        office.step()
    patient = [office.waited(name) for name in office.came if name.startswith("patient")]
    bound = levels * aging_s + 10 * per_request_s
    assert max(patient) <= bound
    assert max(office.waited(name) for name in office.came) <= bound


def test_under_overload_aging_still_bounds_how_far_a_request_falls_back() -> None:
    """Twice the load that can be served: waits grow for all, but nobody is overtaken without end."""
    aging_s, levels = 0.5, 4
    office = Office(PriorityPolicy(aging_s), slots=4)
    for i in range(600):
        office.add(f"urgent {i}", priority=0) if i % 5 else office.add(f"patient {i}", priority=levels)
        office.step()
    for name in office.order:
        if name.startswith("patient"):
            overtakers = [
                other
                for other in office.order[: office.order.index(name)]
                if office.came[other] > office.came[name] + levels * aging_s
            ]
            assert overtakers == []


@pytest.mark.parametrize("shape", [(20, 10), (300, 4), (4, 60)])
def test_two_clients_get_equal_shares_though_one_sends_twenty_times_the_load(shape: tuple[int, int]) -> None:
    prompt_len, max_tokens = shape
    office = Office(make_policy("fair", aging_s=1.0, quantum=16))
    number = 0

    def keep_waiting(client: str, count: int) -> None:
        nonlocal number
        waiting = sum(
            view.state == "waiting"
            for view in office.scheduler.sequences()
            if office.clients[view.request_id] == client
        )
        for _ in range(count - waiting):
            number += 1
            office.add(f"{client}{number}", prompt_len, max_tokens, client=client)

    keep_waiting("loud", 40)
    for _ in range(50):  # alone at first: that earns no lasting advantage, and no debt beyond what it has running
        office.step()
        keep_waiting("loud", 40)
    office.served.clear()
    for _ in range(400):
        keep_waiting("loud", 40)
        keep_waiting("quiet", 2)
        office.step()
    assert office.served["quiet"] == pytest.approx(office.served["loud"], rel=0.1)


def test_fair_shares_count_tokens_not_requests() -> None:
    office = Office(make_policy("fair", aging_s=1.0, quantum=16))
    for i in range(60):
        office.add(f"long {i}", 200, 20, client="long")
    for i in range(600):
        office.add(f"short {i}", 10, 10, client="short")
    for _ in range(600):
        office.step()
    assert office.served["short"] == pytest.approx(office.served["long"], rel=0.1)


def test_answers_that_end_early_are_charged_for_what_they_were() -> None:
    """Both ask for 60 tokens. One gets them; the other's answers stop at the first, and what was prepaid comes back."""
    office = Office(make_policy("fair", aging_s=1.0, quantum=16))
    for i in range(400):
        office.add(f"long {i}", 10, 60, client="long")
        office.add(f"brief {i}", 10, 60, client="brief", stops=True)
        office.add(f"brief too {i}", 10, 60, client="brief", stops=True)
    for _ in range(600):
        office.step()
    assert office.scheduler.num_waiting > 100
    assert office.served["brief"] == pytest.approx(office.served["long"], rel=0.1)


def test_a_request_prepays_what_answers_had_lately_and_draws_use_that_up() -> None:
    office = Office(make_policy("fair", aging_s=1.0, quantum=16), slots=1)
    for i in range(80):
        office.add(f"r{i}", 5, 10)
    office.add("short", 5, 4)
    office.add("long", 5, 90)
    prepaid: dict[str, list[int]] = {"short": [], "long": []}
    while office.scheduler.has_unfinished:
        office.step()
        for seq in office.scheduler.sequences():
            if seq.request_id in prepaid and seq.state == "running":
                prepaid[seq.request_id].append(seq.prepaid)
    assert prepaid["short"] == [3, 2, 1]
    assert prepaid["long"][:12] == [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0]  # of 9.4: the short one's 4 count as a tenth


def test_no_credit_is_banked_while_nothing_waits() -> None:
    """One long answer keeps a client known, not waiting, while another has a hundred rounds."""
    office = Office(make_policy("fair", aging_s=1.0, quantum=16), slots=3)
    office.add("quiet's long answer", 10, 2_000, client="quiet")
    for i in range(400):
        office.add(f"loud {i}", 10, 10, client="loud")
    for _ in range(500):
        office.step()
    for i in range(100):
        office.add(f"quiet {i}", 10, 10, client="quiet")
    office.served.clear()
    office.order.clear()
    for _ in range(200):
        office.step()
    loud = sum(name.startswith("loud") for name in office.order)
    quiet = sum(name.startswith("quiet") for name in office.order)
    assert loud >= 10, "the loud one has to stand back for what the quiet one did not use"
    assert quiet >= 10, "the quiet one's long answer is not held against it without end"


def test_a_client_that_had_nothing_waiting_starts_without_credit() -> None:
    policy, order = FairPolicy(quantum=100), []

    def wait(*names: str) -> None:
        for name in names:
            policy.add(sequence(name, client=name[0]))

    def admit(num_tokens: int) -> None:
        seq = next(policy.candidates())
        policy.remove(seq)
        policy.admitted(seq, num_tokens)
        order.append(seq.request_id)

    wait("b1")
    admit(10)  # b has 90 of its 100 left, and runs
    wait("a1", "a2", "a3")
    admit(30)  # a gets its 100; b, with nothing waiting, nothing, and loses what was left
    wait("b2")
    admit(80)  # a has used its round up
    admit(20)  # a new round, in the same order
    assert order == ["b1", "a1", "a2", "a3"]


def test_a_newcomer_is_served_next_however_long_the_queue_of_another() -> None:
    office = Office(make_policy("fair", aging_s=1.0, quantum=16))
    for i in range(500):
        office.add(f"loud {i}", client="loud")
    for _ in range(100):
        office.step()
    office.add("newcomer", client="quiet")
    while "newcomer" not in office.began:
        office.step()
    assert office.waited("newcomer") <= 11 * STEP_S  # until a running one ends


def test_many_clients_take_turns() -> None:
    office = Office(make_policy("fair", aging_s=1.0, quantum=16), slots=1)
    for i in range(3):
        for client in "abcd":
            office.add(f"{client}{i}", client=client)
    while office.scheduler.has_unfinished:
        office.step()
    turns = [name[0] for name in office.order]
    assert [sorted(turns[i : i + 4]) for i in (0, 4, 8)] == [list("abcd")] * 3


def test_the_fair_policy_preempts_the_client_that_is_furthest_ahead() -> None:
    office = Office(make_policy("fair", aging_s=1.0, quantum=16), num_blocks=14)
    for name, client in (("a", "quiet"), ("b", "loud"), ("c", "loud"), ("d", "quiet2")):
        office.add(name, 20, 80, client=client)
    while not office.preempted:
        office.step()
    assert office.preempted == ["c"]


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair"])
def test_a_policy_that_begins_again_knows_nobody(name: str) -> None:
    policy = make_policy(name, aging_s=1.0, quantum=16)  # type: ignore[arg-type]
    for index in range(3):
        policy.add(sequence(f"before {index}", client=f"client {index}"))
    policy.clear()
    assert policy.num_waiting == 0
    assert list(policy.candidates()) == []
    policy.add(sequence("after", client="client 0"))
    assert [seq.request_id for seq in policy.candidates()] == ["after"]
    if isinstance(policy, FairPolicy):
        assert list(policy._ring) == list(policy._clients) == ["client 0"]


def test_an_idle_client_is_forgotten() -> None:
    policy = FairPolicy(quantum=16)
    office = Office(policy)
    for i in range(50):
        office.add(f"r{i}", client=f"client {i}")
    while office.scheduler.has_unfinished:
        office.step()
    assert policy._clients == {}
    assert not policy._ring


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair"])
def test_a_preempted_sequence_goes_to_the_head_of_its_class(name: str) -> None:
    policy = make_policy(name, aging_s=10.0, quantum=16)  # type: ignore[arg-type]

    urgent, first, second, third = (
        sequence(f"{i}", arrival_s=i / 100, priority=int(i > 0), client="x" if i else "y") for i in range(4)
    )
    for seq in (urgent, first, second, third):
        policy.add(seq)
    for seq in (second, third):
        policy.remove(seq)
    policy.requeue(third)
    policy.requeue(second)
    order = [seq.request_id for seq in policy.candidates()]
    assert [name for name in order if name != "0"] == ["2", "3", "1"]
    assert policy.num_waiting == 4
    if name == "priority":
        assert order[0] == "0"


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair"])
def test_a_step_looks_at_256_waiting_requests_at_most(name: str) -> None:
    policy = make_policy(name, aging_s=10.0, quantum=16)  # type: ignore[arg-type]
    for i in range(300):
        policy.add(sequence(f"{i}", client=f"{i % 3}"))
    looked_at = [seq.request_id for seq in policy.candidates()]
    assert len(looked_at) == len(set(looked_at)) == 256
    assert policy.num_waiting == 300
