"""Every documented rule of admission, preemption and forks has a planted fault that the random schedules notice.

A fault is a changed line of the product. The rule is quoted from docs/scheduling.md, so that a rule that is rewritten
there, or a line that is rewritten in the code, asks for a new fault here.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_schedule_invariance import NUM_SCHEDULES, run_schedules

from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.memory.prefix_tree import PrefixTree
from octavo.scheduler.admission import AdmissionControl
from octavo.scheduler.policy import FairPolicy, QueuePolicy
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"


class Fault(NamedTuple):
    rule: str  # words of docs/scheduling.md
    where: Any  # a function, or a property
    line: str  # stands once in its source
    planted: str


FAULTS = {
    # A step
    "admits where it preempted": Fault(
        "Not in a step that preempted.", Scheduler.plan, "if not draft.preempted:", "if True:"
    ),
    # Admission
    "charges what is cached": Fault(
        "only what is not cached is charged to the budget",
        AdmissionControl._try_admit,
        "budget.spend(cached, num_tokens)",
        "budget.spend(0, cached + num_tokens)",
    ),
    "takes the last token from the cache": Fault(
        "The last known token is never taken from the cache",
        Sequence.lookup_limit,
        "limit = len(self.tokens) - 1",
        "limit = len(self.tokens)",
    ),
    "looks at the prompt alone": Fault(
        "It is admitted if its whole known length fits",
        AdmissionControl._try_admit,
        "if not manager.fits(match, length, room):",
        "if not manager.fits(match, min(length, seq.prompt_len), room):",
    ),
    "forgets what running prompts have to allocate": Fault(
        "beside what running prompts still have to allocate",
        KVCacheManager.room_beside,
        "- sum([count for count in owed if count > 0])",
        "",
    ),
    "keeps no block for the running": Fault(
        "one block for each running sequence",
        KVCacheManager.room_beside,
        "- len(running)",
        "",
    ),
    "keeps a block for nobody": Fault(
        "With nobody running, any request that fits in the pool fits",
        KVCacheManager.room_beside,
        "- len(running)",
        "- len(running) - 1",
    ),
    "lets others overtake": Fault(
        "Nobody overtakes a request that lacks memory, budget or a free sequence",
        AdmissionControl.admit,
        "return",
        "continue",
    ),
    "queues what can never fit": Fault(
        "A request that could not fit even alone fails at once",
        Scheduler.add,
        "if shortage is not None:",
        "if False:",
    ),
    "refuses what fits exactly": Fault(
        "A request that could not fit even alone fails at once",
        KVCacheManager.shortage,
        "if need[0] > need[1]",
        "if need[0] >= need[1]",
    ),
    "lets nobody pass those who wait for a running sequence": Fault(
        "Two kinds of waiting do let others pass",
        AdmissionControl.admit,
        "seq.held_up_since_s = draft.now\n            continue",
        "seq.held_up_since_s = draft.now\n            return",
    ),
    "computes a shared prefix twice": Fault(
        "the next block it needs is being computed",
        AdmissionControl._match,
        'if match.reason == "in flight":',
        "if False:",
    ),
    "waits on when the one that computes has gone": Fault(
        "If the one that computes it ends or is preempted, the first of the waiting takes over in the next step",
        AdmissionControl._match,
        "if self._manager.is_in_flight(seq.awaiting):",
        "if True:",
    ),
    "announces blocks of the dead": Fault(
        "If the one that computes it ends or is preempted, the first of the waiting takes over in the next step",
        KVCacheManager.release,
        "if self._in_flight.get(block_hash) is table:",
        "if False:",
    ),
    # Preemption
    "preempts before it evicts": Fault(
        "The pool is dry when there is no free block and none that only the tree holds",
        KVCacheManager.grow,
        "(blocks.pool.num_free or blocks.num_unreferenced)",
        "blocks.pool.num_free",
    ),
    "preempts the second in line": Fault(
        "**Who**: the last in policy order", QueuePolicy.victim, "return running[-1]", "return running[1]"
    ),
    "fair preempts whoever came last": Fault(
        "Under `fair`, the newest of the client that is furthest ahead",
        FairPolicy.victim,
        "return min(",
        "return running[-1]\n    return min(",
    ),
    "fair preempts the oldest": Fault(
        "Under `fair`, the newest of the client that is furthest ahead",
        FairPolicy.victim,
        "reversed(running[1:])",
        "running[1:]",
    ),
    "preempts the first": Fault(
        "**Never the first in policy order.**", QueuePolicy.victim, "return running[-1]", "return running[0]"
    ),
    "forgets what was computed": Fault(
        "What it had computed stays in the prefix tree while there is room",
        Scheduler._preempt,
        "self.manager.release(victim.table)",
        "self.manager.release(victim.table, suspect=True)",
    ),
    "keeps the place in the plan": Fault(
        "If it already had a place in the plan being made, it loses that place",
        Scheduler._preempt,
        "draft.placed.pop(victim, None)",
        "pass",
    ),
    "sends it to the tail": Fault(
        "It waits at the head of its class",
        QueuePolicy.requeue,
        "if ranks and min(ranks) < seq.rank:",
        "if ranks:\n        seq.rank = (max(ranks)[0], max(ranks)[1] + 1)\n    if False:",
    ),
    "lets it back before all of it fits": Fault(
        "returns when its *whole* known length fits beside one block for each running sequence",
        AdmissionControl._try_admit,
        "if not manager.fits(match, length, room):",
        "if not seq.num_preemptions and not manager.fits(match, length, room):",
    ),
    "forgets the tokens": Fault(
        "Its seed and its tokens are kept",
        Scheduler._preempt,
        "victim.num_computed = 0",
        "victim.num_computed = 0\n    del victim.tokens[victim.prompt_len :]",
    ),
    "computes prompt logprobs again": Fault(
        "Prompt logprobs already delivered are not computed again",
        Scheduler._preempt,
        "victim.num_computed = 0",
        "victim.num_computed = 0\n    victim.next_prompt_logprob = min(1, victim.next_prompt_logprob)",
    ),
    # Forks
    "lets forks compute the prompt too": Fault(
        "While one member of such a family computes the prompt, the rest wait",
        AdmissionControl._match,
        'return "fork_parent"',
        "pass",
    ),
    "forks before the prompt has KV": Fault(
        "Once its positions up to the last prompt token have KV",
        AdmissionControl._match,
        "o.num_computed >= prompt_computed",
        "o.num_computed >= prompt_computed - 1",
    ),
    "forks in the step of the admission": Fault(
        "Once its positions up to the last prompt token have KV",
        AdmissionControl._match,
        "and o.admitted_step != step_id",
        "",
    ),
    "shares the block that is only partly filled": Fault(
        "copies the one that is only partly filled",
        KVCacheManager.fork,
        "copy_from = tuple(row.ids[whole] for _, row in table.paged) if rest else None",
        "copy_from = None",
    ),
    "lets only the first member serve": Fault(
        "Any running member can serve",
        AdmissionControl._match,
        "and o.admitted_step != step_id]",
        "and o.admitted_step != step_id and o is self._groups[seq.group][0]]",
    ),
    "waits for a family of which nobody runs": Fault(
        "if none runs any more, the first in line computes the prompt",
        AdmissionControl._match,
        "if not ready and siblings and not seq.num_preemptions:",
        "if not ready and len(self._groups[seq.group]) > 1 and not seq.num_preemptions:",
    ),
}
#: The same for models whose layers keep different things. Here the books are not checked, only what is drawn.
GROUP_FAULTS = {
    "gives back one position too early": Fault(
        "gives back what no query from its last computed position on can see",
        KVCacheManager.commit,
        "blocks.first_block(num_computed - 1)",
        "blocks.first_block(num_computed + 1)",
    ),
    "honours a window that lacks a block": Fault(
        "a window group what a query there can see",
        PrefixTree._usable,
        "count - group.first_block(count * size)",
        "count - group.first_block(count * size) - 1",
    ),
    "keeps a state one block too late": Fault(
        "a state group the state exactly there",
        KVCacheManager._cache,
        "self._keep_state(self._blocks[g], state, node, table)",
        "self._keep_state(self._blocks[g], state, node.parent if node.depth > 1 else node, table)",
    ),
    "lets a fork write the state that it shares": Fault(
        "A step writes the slot that it reads only if nobody else holds that",
        KVCacheManager._can_write,
        "if read != NO_BLOCK and blocks.pool.refs(read) == 1:",
        "if read != NO_BLOCK:",
    ),
    "asks one group alone": Fault(
        "Admission asks every group",
        KVCacheManager.fits,
        "for g, blocks in enumerate(self._blocks):",
        "for g, blocks in enumerate(self._blocks[:1]):",
    ),
}


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Replace the function by one with the changed line."""
    function = fault.where.fget if isinstance(fault.where, property) else fault.where
    assert function is not None
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.line) == 1, f"{function.__qualname__} has no {fault.line!r}: plant another fault"
    module = sys.modules[function.__module__]
    code = compile(
        "from __future__ import annotations\n" + source.replace(fault.line, fault.planted),
        module.__file__ or "",
        "exec",
    )
    names: dict[str, Any] = {}
    exec(code, {**vars(module)}, names)
    owner, _, name = function.__qualname__.partition(".")
    patch.setattr(vars(module)[owner], name, names[name])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_planted_in_a_documented_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FAULTS[name], monkeypatch)
    with pytest.raises(AssertionError):
        run_schedules(range(NUM_SCHEDULES))


@pytest.mark.parametrize("name", GROUP_FAULTS)
def test_so_is_one_planted_in_a_rule_of_cache_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(GROUP_FAULTS[name], monkeypatch)
    monkeypatch.setattr(KVCacheManager, "check_integrity", lambda manager: None)
    with pytest.raises(AssertionError):
        run_schedules(range(NUM_SCHEDULES), mixed=True)


def words(text: str) -> str:
    return " ".join(text.split())


def test_each_fault_names_a_rule_that_is_documented() -> None:
    page = words(PAGE.read_text(encoding="utf-8"))
    faults = [*FAULTS.values(), *GROUP_FAULTS.values()]
    assert [fault.rule for fault in faults if fault.rule not in page] == []


def test_each_documented_rule_of_admission_and_preemption_has_a_fault() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for title in ("Admission", "Preemption"):
        section = re.split(r"^##+ ", page[page.index(f"\n## {title}\n") :], flags=re.MULTILINE)[1]
        bullets = [words(bullet) for bullet in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]
        assert len(bullets) >= 4
        bare = [bullet for bullet in bullets if not any(fault.rule in bullet for fault in FAULTS.values())]
        assert [bullet for bullet in bare if not bullet.startswith("`fork_parent`: see forks")] == []
