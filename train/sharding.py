"""How the ranks of a run share its model.

The launcher decides it, by accelerate's environment; a recipe says nothing of it. Data-parallel
ranks hold the whole model (DDP). DeepSpeed's ZeRO-2 splits gradients and optimizer, ZeRO-3 and
FSDP2 the weights as well.
"""

import os
import warnings
from datetime import timedelta
from importlib.util import find_spec

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from recipes.errors import UserError
from recipes.schema import Recipe
from recipes.sharding import Sharding

WHOLE_MODEL_ON_EACH_RANK = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
)
# Ranks wait for the main one while it saves or evaluates; that a rank is gone, torchrun sees.
_PATIENCE = timedelta(hours=4)


def open_accelerator(config: Recipe) -> Accelerator:
    """The accelerator of a run, as its launcher's environment asks for.

    Raises:
        UserError: a way of sharing the model that is not supported, or that the recipe's settings
            do not go with.
    """
    asks_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    meeting = InitProcessGroupKwargs(timeout=_PATIENCE)
    if asks_deepspeed:
        if find_spec("deepspeed") is None:
            raise UserError(
                "the launcher asks for DeepSpeed, which is not installed: "
                "pip install 'coinrag[deepspeed]'"
            )
        # Its calls of torch, hundreds of times.
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
        if not torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cpu"
            from deepspeed import ops

            # It would compile collectives for CPU ranks before anything else; gloo has some.
            ops.__compatible_ops__["deepspeed_shm_comm"] = False
            meeting.backend = "gloo"
    accelerator = Accelerator(
        mixed_precision=config.train.mixed_precision,
        kwargs_handlers=[meeting],
    )
    if asks_deepspeed and accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise UserError(
            "accelerate leaves DeepSpeed out where it is told to use the CPU or starts one process "
            "without torchrun: use `coinrag train --processes N --sharding zero2|zero3`"
        )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        _set_up_fsdp(accelerator)
    if zero_stage(accelerator):
        _set_up_zero(accelerator, config.train.max_grad_norm)
    if accelerator.distributed_type not in WHOLE_MODEL_ON_EACH_RANK:
        refuse_unshared(accelerator, config)
    return accelerator


def zero_stage(accelerator: Accelerator) -> int:
    """DeepSpeed's ZeRO stage; 0 without DeepSpeed."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return 0
    return int(accelerator.deepspeed_plugin.zero_stage)


def splits_weights(accelerator: Accelerator) -> bool:
    """Whether each rank holds a part of the weights, so that all compute together or none."""
    return zero_stage(accelerator) == 3 or bool(accelerator.is_fsdp2)


def _set_up_fsdp(accelerator: Accelerator) -> None:
    """Sets FSDP2 up on CPUs too, and its precision.

    Raises:
        UserError: there is one rank.
    """
    state = accelerator.state
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate takes no notice of FSDP on CPUs, where torch's works as on GPUs.
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    if accelerator.distributed_type != DistributedType.FSDP:
        raise UserError(
            "the launcher asks for FSDP, which shares a model between ranks, and started one: use "
            "`coinrag train --processes N --sharding fsdp2`"
        )
    if accelerator.mixed_precision == "bf16":
        # Inputs stay as they are: the packed layout's rotations are fp32.
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


def _set_up_zero(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Precision of gradients, and what a step is, which are the recipe's and the trainer's."""
    plugin = accelerator.deepspeed_plugin
    # By it transformers would split every model that is read, also the one that only the main rank
    # reads; decay, adapters and link tokens need the weights' shapes.
    plugin.dschf = None
    plugin.deepspeed_config |= {
        "gradient_clipping": max_grad_norm,
        # The trainer says which pass is a step's last, and weighs their losses.
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        # With offloading the same optimizer, on the CPU, where DeepSpeed's would be compiled first.
        "zero_force_ds_cpu_optimizer": False,
    }


def refuse_unshared(accelerator: Accelerator, config: Recipe) -> None:
    """Refuses what the launcher sets up in a way that is not supported, or not for the recipe.

    Raises:
        UserError: see also `refuse_unsharable`.
    """
    stage, plugin = zero_stage(accelerator), getattr(accelerator.state, "fsdp_plugin", None)
    if stage not in (2, 3) and not accelerator.is_fsdp2:
        raise UserError(
            f"training under {accelerator.distributed_type.value} is not supported as the launcher "
            "sets it up: DDP, ZeRO-2, ZeRO-3 and FSDP2 are; see launch/accelerate"
        )
    if stage and "nvme" in (
        accelerator.deepspeed_plugin.offload_optimizer_device,
        accelerator.deepspeed_plugin.offload_param_device,
    ):
        raise UserError(
            "the launcher offloads to NVMe, which is not supported: set offload_optimizer_device "
            "and offload_param_device to cpu or none"
        )
    if plugin is not None and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UserError(
            "the launcher offloads under FSDP2 (fsdp_offload_params), which is not supported: set "
            "it to false, or use --sharding zero3_offload"
        )
    shardings: dict[int, Sharding] = {2: "zero2", 3: "zero3"}
    refuse_unsharable(config, shardings.get(stage, "fsdp2"))


def refuse_unsharable(config: Recipe, sharding: Sharding) -> None:
    """Refuses a recipe that ranks cannot share so, or that would not train what it says.

    Raises:
        UserError
    """
    if sharding == "ddp":
        return
    name = "FSDP2" if sharding == "fsdp2" else f"ZeRO-{sharding[4]}"
    train = config.train
    if train.optimizer != "adamw":
        raise UserError(
            f"train.optimizer={train.optimizer} needs whole weights on each rank, and {name} "
            "splits the optimizer: use train.optimizer=adamw, or --sharding ddp"
        )
    if config.model.dtype != "float32" and train.mixed_precision == "no":
        raise UserError(
            f"model.dtype={config.model.dtype} under {name} needs train.mixed_precision=bf16 "
            f"({name} trains all weights in one precision)"
        )
    apart = [one for one in ("contextualizer", "repair") if getattr(config.context, one)]
    if sharding != "zero2" and train.evaluate is not None and apart:
        raise UserError(
            f"train.evaluate with context.{apart[0]} computes outside of the model's own passes, "
            f"and {name} splits its weights: use --sharding ddp or zero2, or leave train.evaluate "
            "out and run `coinrag compare` afterwards"
        )
