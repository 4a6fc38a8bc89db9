"""Requests are shared out to replicas by tokens, and credited back however they end."""

import random

from sim_worker import make_add, make_scheduler


def test_burst_is_shared_out_evenly_and_credited_back() -> None:
    scheduler = make_scheduler(dp_size=4)
    for index in range(400):
        scheduler.add(make_add(f"r{index}", [1, 2, 3], 5))
    placed = [replica.num_waiting for replica in scheduler.stats().replicas]
    assert all(abs(each - 100) <= 2 for each in placed)
    for index in range(0, 400, 2):
        scheduler.abort(f"r{index}")
    balancer = scheduler._balancer
    assert sum(balancer.requests) == 200
    for index in range(1, 400, 2):
        scheduler.abort(f"r{index}")
    assert balancer.requests == balancer.tokens == [0] * 4


def test_long_prompts_are_balanced_by_tokens_and_ties_rotate() -> None:
    scheduler, rng = (
        make_scheduler(dp_size=4, max_model_len=4000, num_blocks=2000),
        random.Random(0),
    )
    for index in range(200):
        scheduler.add(make_add(f"r{index}", [1] * rng.choice([10, 10, 10, 3000]), 8))
    tokens = scheduler._balancer.tokens
    assert max(tokens) - min(tokens) < 0.2 * max(tokens)
    scheduler = make_scheduler(dp_size=3)
    firsts = []
    for index in range(6):
        scheduler.add(make_add(f"r{index}", [1], 1))
        waiting = [replica.num_waiting for replica in scheduler.stats().replicas]
        firsts.append(waiting.index(1))
        scheduler.abort(f"r{index}")
    assert firsts == [0, 1, 2, 0, 1, 2]
