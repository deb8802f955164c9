"""Compares layers of experts with Hugging Face's in PyTorch, on the same weights: msops.MixtureOfExperts, also its
gradient, and mindformers' two MoELayer, for inference and for training, which run MindSpore's operators for Ascend,
after `patch_mindspore`.

python tests/library_experts.py [--device GPU]     compares; `make test-libraries` runs it on the CPU
python tests/library_experts.py --reference FILE   runs PyTorch's layers, for the first command
"""

import argparse
import importlib
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from libraries import PYTHON_OF_TORCH

WIDTH, HIDDEN, EXPERTS, CHOSEN, TOKENS = 32, 24, 16, 4, 50
MOST = 2e-5  # relative to the greatest number of the result
GROUPS = dict(n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)


class Kind(NamedTuple):
    """A class of Hugging Face's, its configuration, the names of an expert's matrices, and the settings of the layers
    of msops and of mindformers."""

    model: str
    name: str
    config: dict
    matrices: tuple
    own: dict
    of_mindformers: dict


GATED = "gate_proj", "up_proj", "down_proj"
KINDS = {
    "Mixtral": Kind(
        "mixtral", "MixtralSparseMoeBlock", dict(num_local_experts=EXPERTS, intermediate_size=HIDDEN),
        ("w1", "w3", "w2"), dict(renormalize=True), {},
    ),
    "Qwen3-MoE": Kind(
        "qwen3_moe", "Qwen3MoeSparseMoeBlock", dict(num_experts=EXPERTS, norm_topk_prob=False),
        GATED, dict(renormalize=False), dict(norm_topk_prob=False),
    ),
    "DeepSeek-V3": Kind(
        "deepseek_v3", "DeepseekV3MoE", dict(n_routed_experts=EXPERTS, n_shared_experts=1, **GROUPS),
        GATED, dict(score="sigmoid", correction_bias=True, groups=4, top_groups=2, group_top=2, scale=2.5),
        dict(
            moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5,
            moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_fusion=True,
        ),
    ),
}  # fmt: skip


def reference(file):
    """Saves for each kind the tensors of a layer of random weights, tokens, results, and gradients of the tokens."""
    import torch

    found = {}
    torch.manual_seed(0)
    for label, kind in KINDS.items():
        module = importlib.import_module(f"transformers.models.{kind.model}.modeling_{kind.model}")
        config = module.__dict__[kind.name.removesuffix("SparseMoeBlock").removesuffix("MoE") + "Config"]
        layer = module.__dict__[kind.name](
            config(hidden_size=WIDTH, moe_intermediate_size=HIDDEN, num_experts_per_tok=CHOSEN, **kind.config)
        )
        for tensor in layer.state_dict().values():
            tensor.normal_(0, 0.3)
        if hasattr(layer, "shared_experts"):
            torch.nn.init.zeros_(layer.shared_experts.down_proj.weight)
        x, dy = torch.randn(1, TOKENS, WIDTH, requires_grad=True), torch.randn(1, TOKENS, WIDTH)
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(dy)
        zero = torch.zeros_like  # an expert that no token chose has no gradient
        gradients = {f"d/{name}": zero(w) if w.grad is None else w.grad for name, w in layer.named_parameters()}
        tensors = dict(x=x, dy=dy, y=y, dx=x.grad, **gradients, **layer.state_dict())
        found.update({f"{label}/{name}": tensor.detach().numpy() for name, tensor in tensors.items()})
    np.savez(file, **found)


def weights(kind, held):
    """Returns the values of the Parameters of msops.MixtureOfExperts."""

    def of_all(matrix):
        return np.stack([held[f"experts.{e}.{matrix}.weight"] for e in range(EXPERTS)])

    gate, up, down = map(of_all, kind.matrices)
    values = dict(gate=held["gate.weight"], gate_up=np.concatenate((gate, up), 1), down=down)
    if "gate.e_score_correction_bias" in held:
        values.update(correction_bias=held["gate.e_score_correction_bias"])
    return values


def errors_of_msops(kind, held):
    import mindspore
    from mindspore import Tensor

    import msops

    net = msops.MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, CHOSEN, **kind.own)
    for name, value in weights(kind, held).items():
        getattr(net, name).set_data(Tensor(value))
    gradient = mindspore.ops.GradOperation(sens_param=True)(net)
    x = Tensor(held["x"])
    return error(net(x), held["y"]), error(gradient(x, Tensor(held["dy"])), held["dx"])


def configuration(kind, **more):
    from mindformers.parallel_core.transformer_config import TransformerConfig

    settings = dict(
        num_layers=1, num_attention_heads=1, hidden_size=WIDTH, ffn_hidden_size=HIDDEN, moe_ffn_hidden_size=HIDDEN,
        num_moe_experts=EXPERTS, moe_router_topk=CHOSEN, add_bias_linear=False, gated_linear_unit=True,
        hidden_act="silu", params_dtype="float32", compute_dtype="float32", moe_router_dtype="float32",
    )  # fmt: skip
    return TransformerConfig(**{**settings, **more, **kind.of_mindformers})


def fill(net, kind, held, joined=False):
    """Gives a layer of mindformers the weights. One for training has the experts' matrices joined to one."""
    from mindspore import Tensor

    found, values = dict(net.parameters_and_names()), weights(kind, held)
    for name, value in (("weight1", values["gate_up"]), ("weight2", values["down"])):
        matrices = value.swapaxes(1, 2)
        found[f"experts.{name}"].set_data(Tensor(matrices.reshape(-1, matrices.shape[2]) if joined else matrices))
    found["router.weight"].set_data(Tensor(values["gate"]))
    if "correction_bias" in values:
        found["router.expert_bias"].set_data(Tensor(values["correction_bias"]))


def error_of_mindformers(kind, held):
    from mindformers.parallel_core.inference.tensor_parallel import grouped_layers
    from mindformers.parallel_core.inference.transformer import mlp
    from mindformers.parallel_core.inference.transformer.moe import experts, moe_layer, router, token_dispatcher
    from mindformers.parallel_core.utils.spec_utils import ModuleSpec
    from mindspore import Tensor

    products = mlp.MLPSubmodules(
        linear_fc1=grouped_layers.ColumnParallelGroupedLinear, linear_fc2=grouped_layers.RowParallelGroupedLinear
    )
    modules = moe_layer.MoESubmodules(
        router=ModuleSpec(module=router.TopKRouter),
        token_dispatcher=ModuleSpec(module=token_dispatcher.MoEAllGatherTokenDispatcher),
        experts=ModuleSpec(module=experts.GroupedMLP, submodules=products),
    )
    net = moe_layer.MoELayer(configuration(kind), modules)
    fill(net, kind, held)
    return error(net(Tensor(held["x"][0])), held["y"][0])


def errors_of_training(kind, held):
    """Returns the errors of the layer's results, and of the gradients of the tokens and of the experts' matrices. The
    layer is made for graph mode."""
    import mindspore
    from mindformers.parallel_core.training_graph.transformer.moe import ffn, moe_layer
    from mindformers.parallel_core.utils.spec_utils import ModuleSpec
    from mindspore import Tensor

    modules = moe_layer.MoESubmodules(experts=ModuleSpec(module=ffn.FFNGroupedGEMM))
    net = moe_layer.MoELayer(configuration(kind, seq_length=TOKENS, moe_router_topk_scaling_factor=1.0), modules)
    fill(net, kind, held, joined=True)
    x, dy = (Tensor(held[name].swapaxes(0, 1)) for name in ("x", "dy"))

    def product(tokens):
        y = net(tokens, 0.0)[0]
        return (y * dy).sum(), y

    matrices = [net.experts.weight1, net.experts.weight2]
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    (_, y), (dx, of_matrices) = mindspore.value_and_grad(product, 0, matrices, has_aux=True)(x)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    wanted = weights(kind, {name.removeprefix("d/"): value for name, value in held.items() if name.startswith("d/")})
    wanted = [wanted[name].swapaxes(1, 2) for name in ("gate_up", "down")]
    return (
        error(y, held["y"].swapaxes(0, 1)),
        max(error(dx, held["dx"].swapaxes(0, 1)), *(error(*each) for each in zip(of_matrices, wanted))),
    )


def error(got, wanted):
    return np.abs(got.asnumpy().reshape(wanted.shape) - wanted).max() / np.abs(wanted).max()


def main(device, file):
    subprocess.run([PYTHON_OF_TORCH, __file__, "--reference", file], check=True)
    import mindspore

    import msops

    mindspore.set_device(device)
    msops.patch_mindspore()
    arrays, failed = np.load(file), []
    for label, kind in KINDS.items():
        held = {name.partition("/")[2]: arrays[name] for name in arrays.files if name.startswith(f"{label}/")}
        errors = (*errors_of_msops(kind, held), error_of_mindformers(kind, held), *errors_of_training(kind, held))
        print("{}: errors of msops' results {:.0e} and gradients {:.0e}, of mindformers' results {:.0e}, in training "
              "{:.0e} and gradients {:.0e}".format(label, *errors))  # fmt: skip
        failed += [label] if not max(errors) <= MOST else []
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("CPU", "GPU"), default="CPU")
    parser.add_argument("--reference", metavar="FILE")
    options = parser.parse_args()
    if options.reference:
        reference(options.reference)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(options.device, str(Path(folder) / "layers.npz"))
