"""Requests with grammars beside others, through scheduler and worker: texts against oracles."""

import json
import re
import threading

import pytest
from grammar_cases import (
    CASES,
    CITIES,
    END,
    VOCABULARY,
    PatientCompiler,
    ambiguous,
    asking,
    check_texts,
    constrained,
    patient_compiler,
    text_of,
)
from inline import SPEC, Served, alone_topology, make_scheduler, request, run_turns, serve
from inline import worker_config as config

from lockstep.comm.messages import AddRequest
from lockstep.comm.structured import StructuredOutputs
from lockstep.worker.grammars.compiler import GrammarCompiler
from lockstep.worker.grammars.grammar import GrammarError
from lockstep.worker.grammars.limits import ITEMS_AT_A_PLACE
from lockstep.worker.grammars.matcher import Matcher
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.masks import LaneMasks
from lockstep.worker.schedule.scheduler import Scheduler

FREE = {"a": [5, 17, 3], "b": [44, 9, 9, 61, 2, 80, 33], "c": [12]}
SEEDS = range(4)


@pytest.fixture(scope="module")
def compiler() -> PatientCompiler:
    return patient_compiler()


def free(**sampling: object) -> list[AddRequest]:
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 7} | sampling
    return [request(name, prompt, **options) for name, prompt in FREE.items()]


def mixed() -> list[AddRequest]:
    return [*free()[:1], *constrained(SEEDS), *free()[1:]]


@pytest.fixture(scope="module")
def expected(compiler: PatientCompiler) -> dict[str, list[int]]:
    served, *_ = serve(config(run_ahead=0), mixed(), compiler)
    return served.tokens


def test_every_text_is_what_was_asked_for(expected: dict[str, list[int]]) -> None:
    texts = check_texts(expected, SEEDS)
    assert len(texts) > 2 * len(CASES), "random weights at temperature 1 differ"


def test_requests_beside_them_get_the_tokens_they_get_alone(expected) -> None:
    for each in free():
        alone, *_ = serve(config(), [each])
        assert alone.tokens == {each.req_id: expected[each.req_id]}


WAYS = {
    "overlapped": {"run_ahead": 2},
    "graphs, far ahead": {"graph_mode": "FULL_AND_PIECEWISE", "run_ahead": 4},
    "prompts in chunks of one block": {"max_num_batched_tokens": 7},
    "no prefix cache": {"caching": False, "num_blocks": 120},
    "so few blocks that requests are preempted": {"num_blocks": 19},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_serving_gives_the_same_tokens(way: str, expected, compiler) -> None:
    served, scheduler, worker = serve(config(**WAYS[way]), mixed(), compiler)
    assert served.tokens == expected
    assert {served.finish[add.req_id] for add in constrained(SEEDS)} == {"stop"}
    stats = scheduler.stats().replicas[0]
    assert (stats.num_preemptions > 0) == ("preempted" in way)
    assert (stats.num_cached_tokens > 0) == (way != "no prefix cache")
    assert (worker.metrics.num_steps[RunMode.FULL] > 0) == ("graphs" in way)


class Watched:
    """A worker and its scheduler, which is looked at after every launch."""

    def __init__(self, compiler: GrammarCompiler | None, **options: object) -> None:
        self.worker = Worker(config(**options), SPEC, alone_topology())
        self.scheduler: Scheduler = make_scheduler(
            config(**options), self.worker.start().num_blocks, compiler
        )
        self.served = Served()
        self.in_flight: list[tuple[int, bool]] = []
        self.num_masked = 0

    def run(self, *adds: AddRequest) -> Served:
        for add in adds:
            self.scheduler.add(add)
        run_turns(self.worker, self.scheduler, self.served, after_launch=self._look)
        return self.served

    def _look(self) -> None:
        steps = self.scheduler._groups[0].in_flight
        self.in_flight.append((len(steps), any(step.masked for step in list(steps)[:-1])))
        self.num_masked += steps[-1].masked


def test_no_step_runs_ahead_of_a_grammar_and_all_do_without(compiler: PatientCompiler) -> None:
    watched = Watched(compiler, run_ahead=3)
    watched.run(*free(max_tokens=20), asking("r", StructuredOutputs(regex="[a-z]{9}")))
    assert not any(masked for _, masked in watched.in_flight)
    depths = [depth for depth, _ in watched.in_flight]
    assert depths[:9] == [1] * 9 and max(depths[9:]) == 3


def test_only_steps_that_sample_by_a_grammar_have_masks(compiler: PatientCompiler) -> None:
    watched = Watched(compiler, max_num_batched_tokens=7)
    structured = StructuredOutputs(regex="[a-z]{9}")
    watched.run(request("r", list(range(30)), structured_outputs=structured, max_tokens=20))
    assert watched.num_masked == len(watched.served.tokens["r"]) == 9
    assert len(watched.in_flight) == 9 + 4, "a prompt of five chunks, the last of which samples"


def test_steps_without_a_grammar_have_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, *_ = serve(config(graph_mode="FULL_AND_PIECEWISE"), free())

    def refuse(*_: object) -> None:
        raise AssertionError("masks in a step without a grammar")

    watched = Watched(None, graph_mode="FULL_AND_PIECEWISE")
    monkeypatch.setattr(LaneMasks, "apply", refuse)
    assert watched.run(*free()).tokens == plain.tokens


def test_a_text_that_is_cut_off_ends_by_length(compiler: PatientCompiler) -> None:
    structured = StructuredOutputs(regex="(ab)+c")
    adds = [asking(str(n), structured, max_tokens=n, temperature=0.0) for n in (1, 2, 3)]
    adds += [asking("whole", StructuredOutputs(regex="abc"), max_tokens=3)]
    served, *_ = serve(config(), adds, compiler)
    assert [text_of(served.tokens[str(n)]) for n in (1, 2)] == ["a", "ab"]
    assert served.finish["1"] == served.finish["2"] == "length"
    assert (text_of(served.tokens["whole"]), served.finish["whole"]) == ("abc", "stop")


def test_other_parameters_hold_within_the_grammar(compiler: PatientCompiler) -> None:
    letters, x = StructuredOutputs(regex="[a-z]{0,30}"), ord("x") - 32
    adds = [
        asking("biased", letters, max_tokens=6, logit_bias={x: 100.0}),
        asking("ending", letters, logit_bias={END: 100.0}),
        asking("held back", letters, logit_bias={END: 100.0}, min_tokens=5),
        asking("no end", letters, logit_bias={END: 100.0}, stop_ids=[]),
        asking("short of the least", StructuredOutputs(regex="abc"), min_tokens=9),
        asking("stopped", letters, logit_bias={x: 100.0}, stop_ids=[x], stop_token_ids=(x,)),
        asking("filtered", letters, max_tokens=6, top_k=1, repetition_penalty=1.5),
        asking("logprobs", StructuredOutputs(choice=("no", "yes")), logprobs=5),
    ]
    served, *_ = serve(config(), adds, compiler)
    texts = {name: text_of(tokens) for name, tokens in served.tokens.items()}
    assert texts["biased"] == "xxxxxx" and served.finish["biased"] == "length"
    assert texts["ending"] == "" and served.tokens["ending"] == [END]
    assert re.fullmatch("[a-z]{5}", texts["held back"])
    assert served.tokens["held back"][-1] == END
    assert re.fullmatch("[a-z]{30}", texts["no end"]) and served.finish["no end"] == "stop"
    assert texts["short of the least"] == "abc"
    assert served.tokens["stopped"] == [x] and served.finish["stopped"] == "stop"
    assert re.fullmatch("[a-z]{6}", texts["filtered"])
    first, *rest = served.logprobs["logprobs"]
    assert {chr(32 + token) for token in first.top_ids} == {"n", "y"}
    assert all(entry.logprob == 0 and entry.top_ids == [entry.token_id] for entry in rest)


def test_any_json_object_is_one_if_it_ends(compiler: PatientCompiler) -> None:
    wanted = {ord(letter) - 32: 12.0 for letter in '}"'}
    adds = [
        asking(str(seed), StructuredOutputs(json_object=True), seed=seed, logit_bias=wanted)
        for seed in range(8)
    ]
    served, *_ = serve(config(), adds, compiler)
    whole = [name for name, reason in served.finish.items() if reason == "stop"]
    assert len(whole) > 3
    assert all(isinstance(json.loads(text_of(served.tokens[name])), dict) for name in whole)


def test_an_abort_in_the_middle_leaves_the_others_alone(compiler: PatientCompiler) -> None:
    watched = Watched(compiler)
    long = StructuredOutputs(regex="[a-z]{40}")
    for name in ("gone", "stays"):
        watched.scheduler.add(asking(name, long, seed=3))
    for _ in range(4):
        plan = watched.scheduler.plan(0)
        for result in watched.worker.execute(plan):
            watched.served.take(watched.scheduler.commit(result))
    watched.scheduler.abort("gone")
    served = watched.run(asking("comes", StructuredOutputs(choice=CITIES)))
    watched.scheduler.check_conserved()
    assert served.finish == {"gone": "abort", "stays": "stop", "comes": "stop"}
    assert len(served.tokens["stays"]) == 40 and text_of(served.tokens["comes"]) in CITIES


def test_what_cannot_be_compiled_ends_alone(compiler: PatientCompiler) -> None:
    watched = Watched(compiler)
    watched.scheduler.add(asking("bad", StructuredOutputs(regex="(")))
    served = watched.run(asking("good", StructuredOutputs(choice=CITIES)), *free()[:1])
    assert served.finish == {"bad": "error", "good": "stop", "a": "length"}
    with pytest.raises(ValueError, match="structured_outputs are not served"):
        Watched(None).scheduler.add(asking("r", StructuredOutputs(regex="a")))


def test_a_grammar_that_grows_too_large_on_the_way_ends_alone(
    compiler: PatientCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, y = Matcher.take, ord("y") - 32

    def limited(matcher: Matcher, token_id: int) -> None:
        if token_id == y:
            raise GrammarError("too complex")
        take(matcher, token_id)

    monkeypatch.setattr(Matcher, "take", limited)
    watched = Watched(compiler)
    others = asking("good", StructuredOutputs(choice=CITIES)), *free()[:1]
    served = watched.run(asking("bad", StructuredOutputs(regex="xyz")), *others)
    watched.scheduler.check_conserved()
    assert served.finish == {"bad": "error", "good": "stop", "a": "length"}
    assert served.errors == {"bad": "structured_outputs: too complex"}


def test_a_text_with_ever_more_readings_ends_alone_by_a_limit_of_work(
    compiler: PatientCompiler,
) -> None:
    good = asking("good", StructuredOutputs(choice=CITIES), seed=3)
    alone = [serve(config(), [each], compiler)[0] for each in (good, *free()[:1])]
    watched = Watched(compiler)
    hostile = asking("bad", StructuredOutputs(grammar=ambiguous(20)), max_tokens=50, stop_ids=[])
    served = watched.run(hostile, good, *free()[:1])
    watched.scheduler.check_conserved()
    assert served.finish == {"bad": "error", "good": "stop", "a": "length"}
    limit = f"grammar: .* at one place, at most {ITEMS_AT_A_PLACE} are followed"
    assert re.match(f"structured_outputs: {limit}", served.errors["bad"])
    # Each token opens at least as many readings as there are rules.
    assert 1 <= len(served.tokens["bad"]) <= ITEMS_AT_A_PLACE // 20
    assert [served.tokens["good"], served.tokens["a"]] == [
        each.tokens[name] for each, name in zip(alone, ("good", "a"), strict=True)
    ]


def test_others_are_served_while_a_grammar_is_compiled() -> None:
    gate = threading.Event()
    compiler = GrammarCompiler(lambda: gate.wait(60) and VOCABULARY)
    watched = Watched(compiler)
    for name in ("waits", "gone"):
        watched.scheduler.add(asking(name, StructuredOutputs(choice=CITIES)))
    assert watched.run(*free()).finish == dict.fromkeys(FREE, "length")
    watched.scheduler.abort("gone")
    assert watched.scheduler.has_work() and watched.scheduler.num_waiting == 1
    gate.set()
    compiler.start(StructuredOutputs(regex="a"), [], []).result()
    assert text_of(watched.run().tokens["waits"]) in CITIES
    assert watched.served.finish["gone"] == "abort"
    assert not watched.scheduler.has_work()
