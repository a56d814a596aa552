"""The newest supported vLLM, whose wheel needs a GPU to run: the plugin imports there, and what it overrides or calls
has the parameters that the engine of these tests has.

VLLM_NEXT is the folder that its wheel was installed to (`make test-vllm`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# Run in either version: signatures of what the plugin builds on, and of what it puts in their places.
LOOK = """
import inspect, json, sys
if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
import vllm
import quarterturn.integrations.vllm as plugin
plugin.register()
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization import base_config
from vllm.model_executor.layers.fused_moe import activation, fused_moe_method_base
from vllm.model_executor.layers import linear
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor import parameter
from vllm.model_executor.model_loader.reload import inplace
from quarterturn.integrations.vllm import config, experts, linear as ours
base = base_config.QuantizationConfig
theirs = {
    "override_quantization_method": base.override_quantization_method,
    "maybe_update_config": base.maybe_update_config,
    "get_quant_method": base.get_quant_method,
    "get_checkpoint_weight_mapper": base.get_checkpoint_weight_mapper,
    "apply_vllm_mapper": base.apply_vllm_mapper,
    "from_config": base.from_config,
    "linear create_weights": linear.LinearMethodBase.create_weights,
    "linear apply": linear.LinearMethodBase.apply,
    "experts create_weights": fused_moe_method_base.FusedMoEMethodBase.create_weights,
    "experts apply": fused_moe_method_base.FusedMoEMethodBase.apply,
    "experts maybe_roundup_sizes": fused_moe_method_base.FusedMoEMethodBase.maybe_roundup_sizes,
    "apply_moe_activation": activation.apply_moe_activation,
    "reload_weights": inplace.reload_weights,
    "ModelWeightParameter": parameter.ModelWeightParameter.__init__,
    "PerTensorScaleParameter": parameter.PerTensorScaleParameter.__init__,
}
shapes = {name: [p for p in inspect.signature(f).parameters if p not in ("self", "cls")] for name, f in theirs.items()}
shapes["WeightsMapper"] = [n for n in inspect.signature(WeightsMapper).parameters if "regex" in n or "suffix" in n]
mine = {
    "linear create_weights": ours.FP4LinearMethod.create_weights,
    "linear apply": ours.FP4LinearMethod.apply,
    "experts create_weights": experts.FP4ExpertsMethod.create_weights,
    "experts apply": experts.FP4ExpertsMethod.apply,
    "experts maybe_roundup_sizes": experts.FP4ExpertsMethod.maybe_roundup_sizes,
    "maybe_update_config": config.QuarterturnConfig.maybe_update_config,
    "get_quant_method": config.QuarterturnConfig.get_quant_method,
    "override_quantization_method": config.QuarterturnConfig.override_quantization_method,
}
ours_too = {name: [p for p in inspect.signature(f).parameters if p not in ("self", "cls")] for name, f in mine.items()}
classes = (config.QuarterturnConfig, ours.FP4LinearMethod, experts.FP4ExpertsMethod)
abstract = [sorted(c.__abstractmethods__) for c in classes]
registered = get_quantization_config("quarterturn") is config.QuarterturnConfig
seen = []
mapper = WeightsMapper() | config.WatchingMapper(lambda name, data: seen.append(name), {".x": None}) | WeightsMapper()
watched = [[name for name, data in mapper.apply([("a.x", 0), ("b", 1)])], seen]
print("FOUND" + json.dumps([vllm.__version__, shapes, ours_too, abstract, registered, watched]))
"""


def look(*arguments: str) -> list[Any]:
    done = subprocess.run([sys.executable, "-c", LOOK, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "is not a version that this plugin was tested with" not in done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    found: list[Any] = json.loads(line.removeprefix("FOUND"))
    return found


@pytest.mark.every
def test_the_classes_that_we_build_on_are_the_same() -> None:
    folder = os.environ.get("VLLM_NEXT")
    assert folder, "VLLM_NEXT is not set: `make test-vllm` installs that version and names it"
    version, theirs, ours, abstract, registered, watched = look(folder)
    here, known, _, _, _, _ = look()
    assert version != here, "the same version twice says nothing"
    assert version.startswith("0.33.")
    assert theirs == known
    assert registered
    assert abstract == [[], [], []], "a method that the new version asks for is not there"
    assert watched == [["b"], ["a.x", "b"]], "the stream of weights is not looked at"
    for name, parameters in ours.items():
        assert parameters == theirs[name], name


def test_an_unknown_version_is_warned_about_and_does_not_stop_the_engine() -> None:
    code = """
import vllm
vllm.__version__ = "0.99.0"
import quarterturn.integrations.vllm as plugin
plugin.register()
import sys
sys.modules["quarterturn.integrations.vllm.config"] = None
plugin.register()
print("GOES ON")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert "GOES ON" in said
    assert "0.99.0 is not a version that this plugin was tested with" in said
    assert "does not fit vLLM 0.99.0" in said
