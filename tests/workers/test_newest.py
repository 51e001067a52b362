"""A pool whose requests are completed by the weights that are the newest ones when they are handed out, and the feed of
an engine that takes as many pieces as it has room for."""

import time

import pytest

from perl.records import Completion, Prompt, Weights
from perl.workers.pool import WorkerError, WorkerPool
from perl.workers.rollouts import Piece, PieceFeed, Version
from perl.workers.worker import Ready, Working


class Link:
    """Of a worker that holds what it is given. `process`: that does not end."""

    process = None

    def __init__(self, deliver):
        self.deliver, self.batches = deliver, []

    def send(self, batch):
        self.batches.append(batch)

    def kill(self):
        return self.process

    def join(self, timeout): ...

    def exit_reason(self):
        return "killed"


class Links:
    """An executor of one worker that this process plays."""

    workers = 1

    class devices:
        kind = "cpu"

    def __init__(self):
        self.links = []

    def environment(self, index):
        return {}

    def start(self, spec, deliver):
        self.links.append(Link(deliver))
        return self.links[-1]

    def shared(self, payload):
        return payload

    def close(self): ...


class Job:
    unit = "pieces"

    def paths(self, weights):
        return []


def version(number):
    return Version("run", Weights(number), f"digest {number}")


def pieces(call, count=2):
    return [Piece((call, place), (Prompt(token_ids=(1,), seed=place),) * 2) for place in range(count)]


@pytest.mark.parametrize("newest", [True, False])
def test_what_nobody_has_begun_takes_the_weights_that_are_submitted_last(tmp_path, newest):
    """What has been given stays with its policy, and is drawn by the newest one when its worker dies. No payload is
    kept that nothing needs."""
    executor = Links()
    with WorkerPool(executor, Job(), tmp_path, newest=newest) as pool:
        pool.submit(version(0), pieces(0), b"zero")
        pool.poll(0.0)
        (link,) = executor.links
        link.deliver(Ready(1))
        pool.poll(0.0)
        pool.poll(0.0)  # hands out what it works on, and no second piece, which another worker could begin
        given = [(0, 0)]
        assert [(b.weights.weights.version, [p.id for p in b.requests], b.payload) for b in link.batches] == [
            (0, given, b"zero")
        ]
        pool.submit(version(1), pieces(1), b"one")
        pool.submit(version(2), pieces(2), b"two")
        assert set(pool._payloads) == {version(0), version(2)} | (set() if newest else {version(1)})
        link.deliver(None)  # it dies: what it held goes back
        pool.poll(0.0)
        pool.poll(0.0)
        executor.links[1].deliver(Ready(1))
        for _ in range(4):
            pool.poll(0.0)
        again = executor.links[1].batches[0]
        assert again.requests[0].id == (0, 0)
        assert (again.weights.weights.version, again.payload) == ((2, b"two") if newest else (0, b"zero"))
        assert set(pool._payloads) == {version(2)} | (set() if newest else {version(0), version(1)})
        pool.unfinished.clear()


@pytest.mark.parametrize("newest", [True, False])
def test_what_a_worker_held_that_was_killed_from_outside_is_drawn_together_again(tmp_path, newest):
    """One piece had an engine for itself, and then the others were drawn with nothing to follow them."""
    executor = Links()
    with WorkerPool(executor, Job(), tmp_path, newest=newest, all_needed=True) as pool:
        pool.submit(version(0), pieces(0, count=8), b"zero")
        pool.poll(0.0)
        executor.links[0].deliver(Ready(4))
        pool.poll(0.0)
        pool.poll(0.0)
        held = [piece.id for piece in executor.links[0].batches[0].requests]
        pool.submit(version(1), [], b"one")
        executor.links[0].deliver(None)
        pool.poll(0.0)
        executor.links[1].deliver(Ready(4))
        pool.poll(0.0)
        pool.poll(0.0)
        (again,) = executor.links[1].batches
        assert [piece.id for piece in again.requests] == held == [(0, place) for place in range(len(held))]
        assert len(held) == (4 if newest else 5)
        assert again.weights == version(int(newest))
        pool.unfinished.clear()


def test_a_worker_gets_once_what_several_weights_are_made_of(tmp_path):
    """Noise is drawn on one policy for each batch of a step."""
    executor, made = Links(), [b"zero", b"one"]
    with WorkerPool(executor, Job(), tmp_path) as pool:
        for call in range(4):
            weights = Version("run", Weights(call // 3, draw=call), f"digest {call}")
            pool.submit(weights, pieces(call, count=1), made[call // 3])
        pool.poll(0.0)
        executor.links[0].deliver(Ready(4))
        pool.poll(0.0)
        pool.poll(0.0)
        assert [batch.payload for batch in executor.links[0].batches] == [b"zero", None, None, b"one"]
        pool.unfinished.clear()


def test_a_worker_that_says_that_it_is_at_work_is_waited_for(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    executor = Links()
    with WorkerPool(executor, Job(), tmp_path, deadline_s=60.0) as pool:
        pool.submit(version(0), pieces(0, count=1), b"zero")
        pool.poll(0.0)
        executor.links[0].deliver(Ready(1))
        pool.poll(0.0)
        for _ in range(5):
            now[0] += 50.0
            executor.links[0].deliver(Working())
            assert pool.poll(0.0) == []
        assert len(executor.links) == 1
        for _ in range(61):  # in one, this process would have been stopped
            now[0] += 1.0
            pool.poll(0.0)
        assert len(executor.links) == 2  # it was started again
        pool.unfinished.clear()


def test_new_weights_need_no_new_pieces(tmp_path):
    executor = Links()
    with WorkerPool(executor, Job(), tmp_path, newest=True) as pool:
        pool.submit(version(0), pieces(0), b"zero")
        pool.poll(0.0)
        pool.submit(version(1), [], b"one")
        executor.links[0].deliver(Ready(1))
        pool.poll(0.0)
        pool.poll(0.0)
        (batch,) = executor.links[0].batches
        assert (batch.weights, batch.payload) == (version(1), b"one")
        assert set(pool._payloads) == {version(1)}
        pool.unfinished.clear()


def test_a_worker_whose_process_does_not_end_is_not_started_again(tmp_path):
    executor = Links()
    with WorkerPool(executor, Job(), tmp_path) as pool:
        pool.submit(version(0), pieces(0), b"zero")
        pool.poll(0.0)
        (link,) = executor.links
        link.process = 4242
        link.deliver(None)
        with pytest.raises(WorkerError, match="the last one: killed; SIGKILL does not end its process 4242"):
            pool.poll(0.0)
        assert executor.links == [link]


class Inbox:
    """Gives what stands in `now`, a version and its pieces; blocks never."""

    def __init__(self):
        self.ended, self.now = False, []

    def next_weights(self, *, wait):
        assert self.now or not wait, "it would wait though pieces are under way"
        return self.now[0][0] if self.now else None

    def take(self):
        return self.now.pop(0)[1]


def test_an_open_feed_takes_pieces_as_they_come_and_ends_before_another_version():
    inbox, completion = Inbox(), Completion(token_ids=(7,), finish_reason="stop")
    first, second, third = pieces(0)[0], pieces(1)[0], pieces(2)[0]
    inbox.now = [(version(0), first)]
    feed = PieceFeed(inbox, version(0), newest=True)
    assert [next(feed), next(feed), next(feed)] == [*first.prompts, None]
    inbox.now = [(version(0), second), (version(1), third)]
    assert [next(feed), next(feed)] == list(second.prompts)
    with pytest.raises(StopIteration):
        next(feed)
    assert feed.done(1, completion) is None
    assert feed.done(3, completion) is None
    done = feed.done(2, completion)
    assert done is not None
    assert done[:2] == (second, (completion, completion))
    assert feed.drained() > 0
    assert inbox.now == [(version(1), third)]


def test_a_closed_feed_is_one_piece():
    inbox = Inbox()
    first, second = pieces(0)
    inbox.now = [(version(0), first), (version(0), second)]
    feed = PieceFeed(inbox, version(0), newest=False)
    assert list(feed) == list(first.prompts)
    assert feed.drained() == 0.0
