"""`make test-libraries` runs models of mindone and mindformers, as they are published, on the CPU, compares them with
the same weights in Hugging Face's libraries for PyTorch, and writes what it found to docs/libraries.md.

python tests/libraries.py [--device GPU] [MODEL ...]      compares all models, or some, such as Llama FLUX
python tests/libraries.py --reference FOLDER MODEL ...    runs them in PyTorch, on the CPU, for the first command
python tests/libraries.py --own DEVICE FOLDER MODEL ...   times them by MindSpore's own operators, for the first command

MODEL_ZOO=FOLDER in the environment adds PointNet2, from a copy of MindSpore's model zoo in that folder. Weights are
random, and sizes tiny: no model is downloaded. PyTorch has an environment of its own: Hugging Face's libraries load it
where they find it, and it and MindSpore's GPU backend bring different libraries of CUDA.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import metadata
from pathlib import Path

import numpy as np

from library_models import MODELS, TEXT

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "libraries.md"
BEGIN, END = "<!-- tests/libraries.py writes this: {} -->\n", "<!-- until here -->\n"
if "MODEL_ZOO" in os.environ:
    sys.path.append(str(Path(os.environ["MODEL_ZOO"]).resolve() / "official" / "cv" / "PointNet2"))
REFERENCE, OWN = "reference.npz", "own.json"
PYTHON_OF_TORCH = ROOT / ".libraries" / "torch" / "bin" / "python"
STEPS, RATE = 3, 1e-3
# Float32 explains these: frequencies of time steps up to 1000 differ by 1000 * 2^-24 where an exponential differs in
# its last bit; the gradients are compared with the greatest of all parameters, since some, such as those of the biases
# of keys, are 0 except for rounding.

PEERS = {"src.pointnet2": "zoo_pointnet2"}  # where PyTorch's class is, if not in Hugging Face's libraries


def loss_of(model, inputs, target, tensor):
    """Returns a model's own loss, or the mean square of its output less numbers of their own."""
    outputs = model(**inputs)
    if target is None:
        return outputs["loss"] if hasattr(outputs, "keys") else outputs[0]
    output = outputs["sample"] if hasattr(outputs, "keys") else outputs[0]
    shape = tuple(output.shape)
    return ((output - tensor(np.random.default_rng(target).standard_normal(shape).astype(np.float32))) ** 2).mean()


def converted(inputs, tensor):
    return {name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in inputs.items()}


def reference(model, folder):
    """Makes the model in PyTorch, and saves it, its losses of some steps, and its first gradients."""
    import torch

    def tensor(array):
        return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)

    library = importlib.import_module(PEERS.get(model.library, "transformers" if model.config else "diffusers"))
    kind = getattr(library, model.name)
    np.random.seed(0)  # noqa: NPY002 (the model zoo draws from it)
    torch.manual_seed(0)
    made = kind(getattr(library, model.config)(**model.settings)) if model.config else kind(**model.settings)
    for parameter in made.parameters():  # so that no parameter is 0 or 1 throughout, which would hide mistakes
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    made.save_pretrained(folder)
    made.train()
    inputs, target = converted(model.inputs, tensor), None if model.has_loss else 1
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss = loss_of(made, inputs, target, tensor)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {
                name: np.zeros(p.shape) if p.grad is None else p.grad.numpy().copy()
                for name, p in made.named_parameters()
            }
        optimizer.step()
    np.savez(folder / REFERENCE, losses=losses, **gradients)


def of_mindone(model, folder):
    """Returns a model with the weights of a folder, its inputs, a function of them that returns the loss, and its
    Parameters by PyTorch's names. mindone also has Parameters of what is a buffer there."""
    import mindspore

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    library = importlib.import_module("mindone.transformers" if model.config else "mindone.diffusers")
    net = getattr(library, model.name).from_pretrained(folder)
    inputs, target = converted(model.inputs, mindspore.Tensor), None if model.config else 1
    found = {torch_name(name): parameter for name, parameter in net.parameters_and_names()}
    return net, (), lambda: loss_of(net, inputs, target, mindspore.Tensor), found


def llama_of_mindformers(model):
    """Returns a Llama and its configuration, in graph mode."""
    import mindspore
    from mindformers import LlamaConfig, LlamaForCausalLM

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    names = dict(
        num_hidden_layers="num_layers", num_attention_heads="num_heads", num_key_value_heads="n_kv_heads",
        max_position_embeddings="max_position_embedding",
    )  # fmt: skip
    settings = {names.get(name, name): value for name, value in model.settings.items()}
    texts, length = TEXT.shape
    settings.update(rms_norm_eps=1e-6, pad_token_id=0, compute_dtype="float32", param_init_type="float32")
    config = LlamaConfig(batch_size=texts, seq_length=length - 1, **settings)
    return LlamaForCausalLM(config), config


def of_mindformers(model, folder):
    """Does as of_mindone, in graph mode. The model takes the labels from the tokens by itself."""
    import mindspore
    from mindformers import LlamaForCausalLM
    from safetensors.numpy import load_file

    (net, config), weights = llama_of_mindformers(model), load_file(folder / "model.safetensors")
    own = LlamaForCausalLM.convert_weight_dict(weights, model_config=config)
    missing, unknown = mindspore.load_param_into_net(net, {name: mindspore.Parameter(w) for name, w in own.items()})
    assert (missing, unknown) == ([], [])
    parameters = dict(net.parameters_and_names())
    found = {name: parameters[LlamaForCausalLM.convert_name(name)] for name in weights}
    return net, (mindspore.Tensor(TEXT),), net, found


def of_mindformers_core(model, folder):
    """Does as of_mindone, in graph mode, by mindformers' model for training, whose Parameters have names of their own.
    The process builds none of mindformers' older models afterwards."""
    import mindspore
    from mindformers.core.context.build_context import build_mf_context
    from safetensors.numpy import load_file

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    build_mf_context(dict(use_legacy=False, context={}, parallel={}, run_mode="train"))
    path, class_name = f"mindformers.models.{CORE[model.config]}", model.config.removesuffix("Config")
    config = getattr(importlib.import_module(f"{path}.configuration_{CORE[model.config]}"), model.config)
    modeling = importlib.import_module(f"{path}.modeling_{CORE[model.config]}_train")
    dtypes = ("compute", "params", "layernorm_compute", "softmax_compute", "rotary", "moe_router")
    settings = dict.fromkeys((f"{name}_dtype" for name in dtypes), "float32")
    if "num_experts" in model.settings:
        settings.update(moe_grouped_gemm=True, moe_aux_loss_coeff=0.0, moe_router_topk_scaling_factor=1.0)
    made = config(
        **model.settings, **settings, seq_length=TEXT.shape[1] - 1, hidden_act="silu", rms_norm_eps=1e-6,
        pad_token_id=0, use_flash_attention=True, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    net = getattr(modeling, f"Training{class_name}ForCausalLM")(made)
    found = {parameter.name: parameter for parameter in net.get_parameters()}
    for name, weight in net.convert_weight_dict(load_file(folder / "model.safetensors")).items():
        found[name].set_data(mindspore.Tensor(weight))

    def forward(tokens, labels):
        return net(tokens, None, None, None, labels)[0]

    return net, tuple(mindspore.Tensor(each) for each in (TEXT[:, :-1], TEXT[:, 1:])), forward, found


def of_zoo(model, folder):
    """Does as of_mindone, without dropout."""
    import mindspore
    from mindspore import ops
    from src import pointnet2_utils
    from src.pointnet2 import NLLLoss, PointNet2

    import msops

    def farthest(xyz, count):
        return msops.furthest_point_sample(xyz, count, start=pointnet2_utils.generate_tensor_fps(*xyz.shape[:2]))

    def last_of_ball(radius, count, xyz, centers):
        return xyz.shape[1] - 1 - msops.ball_query(radius, count, ops.flip(xyz, (1,)), centers)

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    if model.by_msops:
        pointnet2_utils.farthest_point_sample, pointnet2_utils.query_ball_point = farthest, last_of_ball
    net, loss = PointNet2(model.settings["classes"], normal_channel=True), NLLLoss()
    found = {torch_name(name): parameter for name, parameter in net.parameters_and_names()}
    for name, weight in np.load(folder / "weights.npz").items():
        found[name].set_data(mindspore.Tensor(weight.reshape(found[name].shape)))
    net.drop1 = net.drop2 = mindspore.nn.Identity()
    inputs = converted(model.inputs, mindspore.Tensor)
    np.random.seed(0)  # noqa: NPY002 (the first points come from it)
    return net, (), lambda: loss(net(inputs["points"]), inputs["labels"]).mean(), found


CORE = {"Qwen3Config": "qwen3", "Qwen3MoeConfig": "qwen3_moe"}
MAKERS = {
    "mindone": of_mindone,
    "mindformers": of_mindformers,
    "mindformers.parallel_core": of_mindformers_core,
    "src.pointnet2": of_zoo,
}


class Trained:
    """A model with the weights of a folder, PyTorch's losses and gradients, and an optimizer of all parameters that
    have one."""

    def __init__(self, model, folder):
        import mindspore
        from mindspore import mint

        net, self.inputs, forward, found = MAKERS[model.library](model, folder)
        net.set_train()
        self.gradients = dict(np.load(folder / REFERENCE))
        self.losses = self.gradients.pop("losses")
        if model.library == "mindformers.parallel_core":  # it joins matrices
            self.gradients = net.convert_weight_dict(self.gradients)
        parameters = [found[name] for name in self.gradients]
        self.gradient = mindspore.value_and_grad(forward, None, parameters)
        self.optimizer = mint.optim.AdamW(parameters, lr=RATE)

    def step(self):
        """Takes a step, and returns the loss before it, the gradients, and the seconds."""
        begin = time.perf_counter()
        loss, gradients = self.gradient(*self.inputs)
        self.optimizer(gradients)
        loss = float(loss.asnumpy())
        return loss, gradients, time.perf_counter() - begin


def torch_name(name):
    """Returns PyTorch's name of a Parameter: some models of mindone have layers of mindspore.nn."""
    *path, last = name.split(".")
    return ".".join((*path, dict(embedding_table="weight", gamma="weight", beta="bias").get(last, last)))


def compare(model, folder):
    """Returns the errors of the loss, the gradients and the losses of some steps, and the least seconds of a step."""
    trained = Trained(model, folder)
    wanted, gradients = trained.losses, trained.gradients
    losses, first, seconds = [], None, []
    for _ in range(STEPS + 1):
        loss, each, taken = trained.step()
        losses.append(loss)
        first = first or [gradient.asnumpy() for gradient in each]
        seconds.append(taken)
    greatest = max(np.abs(gradient).max() for gradient in gradients.values())
    differences = [
        np.abs(got.reshape(want.shape) - want).max() / greatest for got, want in zip(first, gradients.values())
    ]
    relative = np.abs(np.subtract(losses, wanted) / wanted)
    errors = [relative[0], max(differences), relative.max()]
    if not np.all(np.array(errors) <= model.most):
        raise AssertionError(f"loss, gradients and losses of steps differ by {errors}")
    return errors, min(seconds)


def prepare(device):
    """Chooses the device of MindSpore, where float32 stays float32."""
    import mindspore

    mindspore.set_device(device)
    if device == "GPU":
        mindspore.device_context.gpu.op_precision.conv_allow_tf32(False)


def time_own(device, folder, names):
    """Writes the seconds of a step of models by MindSpore's own operators, or the error that stops them."""
    prepare(device)
    found = {}
    for name in names:
        try:
            trained = Trained(MODELS[name], folder / name)
            found[name] = min(trained.step()[2] for _ in range(STEPS + 1))
        except Exception as error:  # noqa: BLE001 (whatever stops it is what we ask for)
            found[name] = str(error).strip("-\n ").splitlines()[0].strip("- ").replace(f"{folder}/", "")
        (folder / OWN).write_text(json.dumps(found))


def write(device, rows):
    """Writes the table of a device into the page."""
    before, mark, rest = PAGE.read_text().partition(BEGIN.format(device))
    names = ("mindspore", "mindone", "mindformers", "transformers", "diffusers")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names if any(metadata.distributions(name=name)))
    tell = "from importlib.metadata import version; print('torch', version('torch'))"
    versions += f", {subprocess.check_output([PYTHON_OF_TORCH, '-c', tell], text=True).strip()}"
    head = ["model", "class", "error of the loss", "of the gradients", f"of {STEPS} steps' losses", "MindSpore alone"]
    lines = [head, ["---"] * len(head), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    PAGE.write_text(f"{before}{mark}Tried on the {device} with {versions}:\n\n{table}{END}{rest.partition(END)[2]}")


def run(*arguments, python=sys.executable):
    """Runs this file in another process, which may fail."""
    subprocess.run([python, __file__, *map(str, arguments)], check=False)


def main(device, names, folder):
    installed = [name for name, model in MODELS.items() if is_installed(model.library)]
    chosen, failed, rows = names or installed, [], {}
    print(f"{len(chosen)} of {len(MODELS)} models", flush=True)
    run("--reference", folder, *chosen, python=PYTHON_OF_TORCH)
    prepare(device)
    import mindspore

    import msops

    msops.patch_mindspore()
    for name in chosen:
        try:
            errors, seconds = compare(MODELS[name], folder / name)
        except Exception as error:
            logging.getLogger(__name__).exception(name)
            failed.append(f"{name}: {type(error).__name__}")
            mindspore.common.api._pynative_executor.clear_res()  # else the next model's gradient is one of second order
            continue
        rows[name] = [name, f"`{MODELS[name].name}`", *(f"{error:.0e}" for error in errors)]
        print(f"{' | '.join(rows[name])} | a step in {1000 * seconds:.0f} ms", flush=True)
    run("--own", device, folder, *chosen)  # MindSpore's own operators need a process that was never patched
    own = json.loads((folder / OWN).read_text()) if (folder / OWN).is_file() else {}
    for name, row in rows.items():
        outcome = own.get(name, "crashes")
        row.append("runs" if isinstance(outcome, float) else f"fails: {outcome[:80]}")
        print(f"{name} by MindSpore alone: {outcome}")
    if not names and not failed:
        write(device, rows.values())
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def is_installed(library):
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("CPU", "GPU"), default="CPU")
    parser.add_argument("--reference", type=Path, metavar="FOLDER")
    parser.add_argument("--own", nargs=2, metavar=("DEVICE", "FOLDER"))
    parser.add_argument("names", nargs="*", metavar="MODEL")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.chdir(folder)  # where MindSpore writes files of its own
        if options.reference:
            for name in options.names:
                reference(MODELS[name], options.reference / name)
        elif options.own:
            time_own(options.own[0], Path(options.own[1]), options.names)
        else:
            main(options.device, options.names, folder)
