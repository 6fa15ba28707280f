import os
import time
from pathlib import Path

import pytest

from workbench.agent import workers
from workbench.agent.workers import Lost, WorkerPool

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(workers, "STARTUP_SECONDS", 2.0)


def pool(count=2, seconds=1.0):
    return WorkerPool("echo_worker", count, seconds, {"PYTHONPATH": str(HERE)})


def test_answers_come_back_with_their_index():
    with pool(seconds=30) as p:
        answers = dict(p.run([f"say {i}" for i in range(7)]))
    assert answers == {i: f"say {i}\n" for i in range(7)}


def test_a_pool_serves_several_rounds_with_the_same_processes():
    with pool(count=1, seconds=30) as p:
        list(p.run(["say a"]))
        first = p._workers[0].process.pid
        list(p.run(["say b", "say c"]))
        assert [w.process.pid for w in p._workers] == [first]


def test_an_answer_longer_than_the_pipe_arrives_whole():
    with pool(count=1, seconds=30) as p:
        ((_, answer),) = p.run(["long 3000000"])
    assert answer == "long " + "x" * 3_000_000 + "\n"


@pytest.mark.parametrize("verb", ["hang", "fork-and-hang"])
def test_a_hang_costs_only_its_own_job(verb):
    with pool() as p:
        answers = dict(p.run(["say 0", verb, "say 2", "say 3"]))
    lost = answers.pop(1)
    assert isinstance(lost, Lost) and lost.reason == "timeout"
    assert answers == {i: f"say {i}\n" for i in (0, 2, 3)}


def test_a_dead_worker_costs_only_its_own_job():
    with pool(seconds=30) as p:
        answers = dict(p.run(["die", "say 1", "die", "say 3"]))
    assert isinstance(answers[0], Lost) and answers[0].reason == "crash" and "code 7" in answers[0].detail
    assert isinstance(answers[2], Lost)
    assert answers[1] == "say 1\n" and answers[3] == "say 3\n"


def test_what_ran_out_of_memory_is_tried_once_more_with_nothing_beside_it(tmp_path):
    starved = tmp_path / "starved"
    with pool(seconds=30) as p:
        answers = dict(p.run([f"starve {starved}", "wait 0.5", "say 2", "say 3", "wait 0.1", "say 5"]))
    assert answers.pop(0) == "starve 1\n"  # one worker, itself
    assert answers == {1: "wait 0.5\n", 2: "say 2\n", 3: "say 3\n", 4: "wait 0.1\n", 5: "say 5\n"}


def test_what_runs_out_of_memory_alone_too_is_reported_so_and_the_rest_goes_on():
    with pool(seconds=30) as p:
        answers = dict(p.run(["starve-always", "say 1", "starve-always", "say 3"]))
    for n in (0, 2):
        lost = answers.pop(n)
        assert isinstance(lost, Lost) and lost.reason == "memory" and "alone" in lost.detail
    assert answers == {1: "say 1\n", 3: "say 3\n"}


def test_leaving_the_pool_leaves_no_process():
    with pool(count=1) as p:
        p.add("hang")
        assert list(p.poll(patience=0.0)) == []
        pid = p._workers[0].process.pid
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the worker is still there")
