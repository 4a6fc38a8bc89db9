"""Any sequence of add, abort, plan and commit: blocks conserved at all times, outputs exact."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from sim_worker import Rig, expected_outputs

from lockstep.comm.messages import unpack_ids


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what the outside may do in any order; the simulated worker checks every plan."""

    @initialize(
        num_blocks=st.sampled_from([14, 18, 30, 200]),
        run_ahead=st.integers(0, 3),
        caching=st.booleans(),
        shape=st.sampled_from([(1, "auto"), (2, "auto"), (2, "always"), (3, "always")]),
        limits=st.sampled_from([(2, 5), (4, 16), (8, 8), (8, 64)]),
        preempt=st.sampled_from(["youngest", "least_computed"]),
    )
    def start(self, num_blocks, run_ahead, caching, shape, limits, preempt) -> None:
        self.rig = Rig(
            num_blocks=num_blocks, run_ahead=run_ahead, caching=caching, dp_size=shape[0],
            lockstep=shape[1], max_num_seqs=limits[0], max_num_batched_tokens=limits[1],
            preempt=preempt, max_prefill_defer_steps=3,
        )  # fmt: skip
        self.aborted: set[str] = set()

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 28),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        history=st.booleans(),
        stops=st.sampled_from([(), (3, 50, 77)]),
    )
    def add(self, stem, length, tail, max_tokens, history, stops) -> None:
        prompt = [stem] * length + [9] * tail
        more = {"frequency_penalty": 1.0} if history else {}
        seed = len(self.rig.adds)
        self.rig.add(f"r{seed}", prompt, max_tokens, stops=stops, seed=seed, **more)

    @precondition(lambda self: self.rig.adds)
    @rule(number=st.integers(0, 1000))
    def abort(self, number: int) -> None:
        name = f"r{number % len(self.rig.adds)}"
        if name not in self.rig.reasons():
            self.aborted.add(name)
        self.rig.scheduler.abort(name)
        self.rig.deltas += self.rig.scheduler.take_deltas()

    @rule(group=st.integers(0, 2))
    def plan(self, group: int) -> None:
        self.rig.plan(group % self.rig.scheduler.num_groups)

    @rule(dp_rank=st.integers(0, 2), count=st.integers(1, 3))
    def commit(self, dp_rank: int, count: int) -> None:
        dp_rank %= len(self.rig.results)
        for _ in range(min(count, len(self.rig.results[dp_rank]))):
            self.rig.commit(dp_rank)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check_conserved()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        outputs, reasons = self.rig.outputs(), self.rig.reasons()
        assert set(reasons) == set(self.rig.adds)
        for name, add in self.rig.adds.items():
            expected = expected_outputs(add, add.sampling.max_tokens)
            if name in self.aborted:
                assert reasons[name] == "abort"
                assert outputs[name] == expected[: len(outputs[name])]
                continue
            assert outputs[name] == expected
            stopped = expected[-1] in unpack_ids(add.stop_ids)
            assert reasons[name] == ("stop" if stopped else "length")
        for replica in self.rig.scheduler.stats().replicas:
            held = replica.num_blocks - replica.num_free_blocks - replica.num_cached_blocks
            assert held == replica.num_running == replica.num_waiting == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=60)


def test_long_soak() -> None:
    """One long random run with everything on: shared prefixes, stops, aborts, a tight pool."""
    rng = random.Random(11)
    rig = Rig(num_blocks=24, run_ahead=2, dp_size=2, lockstep="always", max_num_seqs=5)
    stems = [[rng.randrange(90) for _ in range(24)] for _ in range(4)]
    live: set[str] = set()
    for turn in range(3000):
        if rng.random() < 0.4:
            name, stem = f"r{turn}", rng.choice(stems)
            stops = (1, 2, 3) if rng.random() < 0.5 else ()
            rig.add(name, stem[: rng.randint(1, 24)], rng.randint(1, 24), stops=stops, seed=turn)
            live.add(name)
        if live and rng.random() < 0.02:
            rig.scheduler.abort(live.pop())
        if rig.plan() is None or rng.random() < 0.3:
            for rank in (0, 1):
                while rig.results[rank]:
                    rig.commit(rank)
        if turn % 50 == 0:
            rig.scheduler.check_conserved()
    rig.run(20_000)
    outputs, reasons = rig.outputs(), rig.reasons()
    for name, add in rig.adds.items():
        expected = expected_outputs(add, add.sampling.max_tokens)
        if reasons[name] != "abort":
            assert outputs[name] == expected
    assert sum(r.num_preemptions for r in rig.scheduler.stats().replicas) > 20
