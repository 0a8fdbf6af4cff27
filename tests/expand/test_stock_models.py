"""Stock models train compiled, unpatched, with the numbers of one device; all of them are in `benchmarks/models.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def models():
    """The benchmark as a module, which imports its helpers from its own folder."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_of_models", BENCHMARKS / "models.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("benchmark_of_models", None)


@pytest.mark.parametrize("name, plan", [("llama", "tp"), ("mixtral", "fsdp"), ("resnet", "dp")])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_stock_model_trains(models, name, plan):
    stock = models.STOCK[name]
    loss, parameter, _ = models.run(stock, *models.plans(models.made(stock))[plan])
    assert max(loss, parameter) < stock.tolerance()
