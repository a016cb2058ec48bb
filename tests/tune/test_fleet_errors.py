"""Errors that are no worker's: a run over several workers ends with them, and does not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilewright.tiles.table import TableRow, forget
from tilewright.tune.fleet import tune_fleet
from tilewright.tune.fleet_run import _DeviceHost
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import Settings
from tune.fake_fleet import FakeFleet, FakeWorker
from tune.toy_op import Machine, loop, problem

BEST = loop(64, 2)
HOT = Settings(timing=Timing(cache="hot", sample_us=500.0, blocks=6), least_slice_s=0.0)


def worker() -> FakeWorker:
    return FakeWorker(Machine(lambda tile: 60.0 if tile == BEST else 100.0))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failing", ["a", "b"])
def test_an_error_on_any_device_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Such as a full disk: the other device must not wait for a problem that never comes back."""
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    forget()
    real = _DeviceHost.put

    def put(self: Any, row: TableRow) -> None:
        if self.device.name.startswith(f"{failing}/"):
            raise OSError("No space left on device")
        real(self, row)

    monkeypatch.setattr(_DeviceHost, "put", put)
    fleet = FakeFleet({"a": worker(), "b": worker()})
    with pytest.raises(OSError, match="No space left"):
        tune_fleet(
            [problem(group=g) for g in (0, 16, 32, 64)],  # none is near another
            fleet,
            specs={"toy": Machine().spec()},
            settings=HOT,
            budget_s=600.0,
            strategy="exhaustive",
        )
    assert fleet.closed
    forget()
