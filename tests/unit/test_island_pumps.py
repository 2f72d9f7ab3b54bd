"""The threads beside the training thread: they work when there is work, sleep when there is none, and fail loudly."""

import threading

import pytest

from diloco_blob.core.errors import Denied
from diloco_blob.island.pumps import InlineDriver, ThreadedDriver
from diloco_blob.testing.clock import VirtualClock


class Counter:
    """A pump that never has anything to do, and counts how often it was asked."""

    def __init__(self, delay: float | None) -> None:
        self.calls = 0
        self.delay = delay
        self.called = threading.Event()

    def __call__(self) -> float | None:
        self.calls += 1
        self.called.set()
        return self.delay


def test_idle_pumps_do_not_wake_each_other():
    pumps = [Counter(3600.0), Counter(None), Counter(3600.0)]
    driver = ThreadedDriver()
    driver.start(pumps)
    for pump in pumps:
        assert pump.called.wait(30)
        pump.called.clear()
    driver.wait(0.2)  # what a waiting training thread does; every pump has told it something by then
    assert [pump.calls for pump in pumps] == [1, 1, 1]
    driver.wake()
    for pump in pumps:
        assert pump.called.wait(30)
    driver.wait(0.2)
    assert [pump.calls for pump in pumps] == [2, 2, 2]
    driver.stop()


def test_a_pump_with_more_to_do_is_called_again_at_once():
    done = threading.Event()
    left = [3, 2, 1]

    def pump() -> float | None:
        if left:
            left.pop()
            return 0.0
        done.set()
        return None

    driver = ThreadedDriver()
    driver.start([pump])
    assert done.wait(30)
    driver.stop()


def test_what_a_pump_raises_reaches_the_training_thread():
    def pump() -> float | None:
        raise Denied("no space left")

    driver = ThreadedDriver()
    driver.start([pump])
    with pytest.raises(Denied, match="no space left"):
        driver.wait(30.0)
    with pytest.raises(Denied):
        driver.check()
    driver.stop()


def test_the_inline_driver_sleeps_until_the_soonest_pump():
    clock = VirtualClock()
    driver = InlineDriver(clock)
    driver.start([Counter(5.0), Counter(None), Counter(2.0)])
    before = clock.monotonic()
    driver.wait(60.0)
    assert clock.monotonic() - before == 2.0
