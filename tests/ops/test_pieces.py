"""Pieces of an oracle's work: joined in order, in threads only where there is enough of it."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from tilewright.ops import pieces
from tilewright.ops.contract import Case
from tilewright.ops.mmq.gpu_spec import gpu_spec as mmq_spec
from tilewright.ops.mmq.reference import mmq_reference
from tilewright.ops.pieces import in_pieces, oracle_pool
from tilewright.ops.w4a16.gpu_spec import gpu_spec as w4a16_spec
from tilewright.ops.w4a16.reference import w4a16_reference


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cut into pieces however small it is."""
    monkeypatch.setattr(pieces, "THREADS", 2)
    monkeypatch.setattr(pieces, "_LEAST", 1 << 10)


@pytest.mark.parametrize("m", [0, 1, 3, 64, 1001])
@pytest.mark.parametrize("n", [0, 1, 7, 64, 1001])
@pytest.mark.usefixtures("always")
def test_pieces_of_the_larger_are_joined_in_order(m: int, n: int) -> None:
    whole = np.random.default_rng(0).standard_normal((m, n))
    seen = []

    def work(some: slice, rows: slice) -> np.ndarray:
        seen.append((some, rows))
        return whole[some, rows]

    np.testing.assert_array_equal(in_pieces(m, n, 64, work), whole)
    assert len(seen) == max(1, min(8, max(m, n) * 64 >> 10))
    if len(seen) > 1:
        assert len({(some if m > n else rows).start for some, rows in seen}) == len(seen)
        assert all((rows if m > n else some) == slice(0, min(m, n)) for some, rows in seen)


def test_a_small_product_is_done_at_once_in_this_thread() -> None:
    def work(some: slice, rows: slice) -> np.ndarray:
        assert threading.current_thread() is threading.main_thread()
        assert (some, rows) == (slice(0, 1), slice(0, 1024))
        return np.zeros((1, 1024))

    assert in_pieces(1, 1024, 1024, work).shape == (1, 1024)


@pytest.mark.usefixtures("always")
def test_what_a_piece_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        in_pieces(1, 64, 64, lambda some, rows: np.zeros((1, 1 // 0)))


@pytest.mark.parametrize("flags", [(), ("bias",)])
@pytest.mark.parametrize("m", [5, 130])
@pytest.mark.usefixtures("always")
def test_an_oracle_in_pieces_is_the_whole_one(m: int, flags: tuple[str, ...]) -> None:
    mmq, w4a16 = mmq_spec("sm_90", "cpu"), w4a16_spec("sm_90", "cpu")
    for spec, case, oracle in (
        (mmq, Case("mmq", "Q4_K", "float16", m, 97, 512, flags=flags), mmq_reference),
        (mmq, Case("mmq", "Q4_K", "float16", m, 97, 512, 0, "int8", flags), mmq_reference),
        (w4a16, Case("w4a16", "uint4", "float16", m, 97, 512, 64, flags=flags), w4a16_reference),
    ):
        inputs = spec.make_inputs(case, 0)
        right = oracle(inputs.x64(), inputs.source, inputs.bias64())  # type: ignore[operator]
        ref = spec.reference(inputs)
        np.testing.assert_allclose(ref, right, rtol=1e-12, atol=1e-12)
        model = spec.error_model(inputs, ref)
        with pytest.MonkeyPatch.context() as once:
            once.setattr(pieces, "_LEAST", 1 << 40)
            np.testing.assert_allclose(model.sigma, spec.error_model(inputs, ref).sigma, rtol=1e-12)


@pytest.mark.usefixtures("always")
def test_products_of_all_pieces_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight pieces with all of BLAS's threads each would contend for every core."""
    monkeypatch.setattr(pieces.os, "cpu_count", lambda: 6)
    before = [one.num_threads for one in pieces._libraries().lib_controllers]
    if not before:
        pytest.skip("numpy has no BLAS that can be limited")
    seen = []

    def work(some: slice, rows: slice) -> np.ndarray:
        seen.append([one.num_threads for one in pieces._libraries().lib_controllers])
        return np.zeros((1, rows.stop - rows.start))

    with pieces._libraries().limit(limits=6):
        in_pieces(1, 64, 64, work)
        assert all(one.num_threads == 6 for one in pieces._libraries().lib_controllers)
    assert {threads for each in seen for threads in each} == {3}
    seen.clear()
    with pieces._libraries().limit(limits=1):
        in_pieces(1, 64, 64, work)
    assert {threads for each in seen for threads in each} == {1}
    assert [one.num_threads for one in pieces._libraries().lib_controllers] == before


class PerThread:
    """Stands for a BLAS whose limit is each thread's own, eight at first."""

    prefix = "libfake"

    def __init__(self) -> None:
        self.lib_controllers = [self]
        self._own = threading.local()

    @property
    def num_threads(self) -> int:
        return getattr(self._own, "limit", 8)

    def limit(self, limits: dict[str, int]) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.callback(self.set_num_threads, self.num_threads)
        self.set_num_threads(limits[self.prefix])
        return stack

    def set_num_threads(self, count: int) -> None:
        self._own.limit = count


def test_a_limit_of_each_thread_is_set_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenBLAS has where it is built with OpenMP."""
    blas = PerThread()
    monkeypatch.setattr(pieces, "_libraries", lambda: blas)
    monkeypatch.setattr(pieces, "THREADS", 2)
    monkeypatch.setattr(pieces.os, "cpu_count", lambda: 6)
    with oracle_pool() as pool:
        assert set(pool.map(lambda _: blas.num_threads, range(8))) == {3}
    assert blas.num_threads == 8


def test_without_a_blas_that_can_be_limited_pieces_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_libraries", lambda: ThreadpoolController().select(prefix="none"))
    with oracle_pool() as pool:
        assert list(pool.map(abs, [-1, 2])) == [1, 2]


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_oracles_of_two_threads_leave_blas_as_it_was(
    first_leaves_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "THREADS", 2)
    monkeypatch.setattr(pieces.os, "cpu_count", lambda: 6)
    libraries = pieces._libraries()
    if not libraries.lib_controllers:
        pytest.skip("numpy has no BLAS that can be limited")
    entered, leave, left = (threading.Event() for _ in range(3))

    def other() -> None:
        with oracle_pool() as pool:
            entered.set()
            assert leave.wait(60)
            assert list(pool.map(abs, [-1])) == [1]
        left.set()

    def limits() -> set[int]:
        return {one.num_threads for one in libraries.lib_controllers}

    thread = threading.Thread(target=other)
    with libraries.limit(limits=6):
        with oracle_pool():
            assert limits() == {3}
            thread.start()
            assert entered.wait(60)
            if not first_leaves_first:
                leave.set()
                assert left.wait(60)
                assert limits() == {3}
        assert limits() == {6}
        leave.set()
        thread.join(60)
        assert left.is_set()
        assert limits() == {6}
