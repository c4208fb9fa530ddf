"""Trains the vision-language model that ships in mmprefill/assets, from scratch, on scenes drawn as it goes.

    python samples/train_shapes_vlm.py WORK --export mmprefill/assets/shapes-vlm

WORK keeps checkpoints: the same command resumes. Batch number i depends on the seed and i alone, so a resumed run sees
what an unbroken one sees. The first steps teach the tower alone, patch by patch, what each patch shows (the scene is
known); then conversations train everything, while heads of three layers are shown where to look. What exists for training
only is dropped on export. `make_scenes.py` and `mmprefill eval` tell how good the model is.
"""

import argparse
import time
from pathlib import Path

import make_scenes as ms
import torch
from torch import Tensor
from training.conversations import Batches
from training.learner import Learner
from training.model import build_model, build_processor, build_tokenizer
from training.optimizer import Optimizer
from transformers import PreTrainedTokenizerFast


def rates_at(i: int, args: argparse.Namespace) -> tuple[float, float]:
    """Relative to the peak, for the tower and for the rest: two times warm-up, a flat part, then straight down.

    Once conversations begin the tower moves slowly: the decoder's early gradients would make it forget what it sees.
    """
    if i < args.seeing:
        rate = min(1.0, (i + 1) / 40, max(0.15, 2 - 2 * i / args.seeing))
        return rate, rate
    done = (i - args.seeing) / (args.steps - args.seeing)
    rate = min(1.0, (i + 1 - args.seeing) / 60, max(0.02, (1 - done) / 0.65))
    return 0.1 * rate, 0.5 * rate


class Report:
    """Progress by kind of question, as running means."""

    def __init__(self) -> None:
        self.loss, self.right, self.start, self.done = {}, {}, time.time(), 0

    def note(self, kinds: Tensor, loss: Tensor, right: Tensor) -> None:
        """Adds a step: of each word of the answers its kind, its loss and whether it was right."""
        for k in kinds.unique().tolist():
            at = kinds == k
            for store, value in ((self.loss, loss[at].mean()), (self.right, right[at].float().mean())):
                store[k] = float(value) if k not in store else 0.9 * store[k] + 0.1 * float(value)

    def line(self, step: int, steps: int, seen: list[float], norm: float) -> str:
        """One line for the log."""
        self.done += 1
        eta = (time.time() - self.start) / self.done * (steps - step) / 60
        kinds = " ".join(f"{ms.KINDS[k]} {v:.3f}/{100 * self.right[k]:.0f}" for k, v in sorted(self.loss.items()))
        return f"{step}/{steps} eta {eta:.0f} min seen {' '.join(f'{x:.3f}' for x in seen)} norm {norm:.1f} {kinds}"


def train(rank: int, args: argparse.Namespace) -> None:
    """One process's part of the run, from the newest checkpoint if there is one.

    Each process has one thread: two threads of one process wait for each other at every operation, which is slow where
    the cores are shared with anything else; two processes meet twice a step.
    """
    torch.set_num_threads(max(1, args.threads // args.processes))
    if args.processes > 1:
        meet = f"file://{(args.work / 'meet').resolve()}"
        torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=args.processes)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    learner = Learner(build_model(tokenizer), tokenizer).to(torch.bfloat16)
    optimizer, start, kept = Optimizer(learner), 0, args.work / "checkpoint.pt"
    spent = 0.0
    if kept.exists():
        saved = torch.load(kept, weights_only=True)
        optimizer.load(saved["optimizer"])
        start, spent = saved["step"], saved["seconds"]
    say = print if rank == 0 else lambda *_, **__: None
    say(f"{sum(p.numel() for p in learner.model.parameters()) / 1e6:.2f} M parameters, from step {start}", flush=True)
    batches, report, began = Batches(args, tokenizer, rank), Report(), time.time()
    for step in range(start, args.steps):
        batch = batches[step]
        seen, loss, right = learner(batch)
        looks = learner.attention.losses
        total = seen if loss is None else loss.mean() + args.seen_weight * seen + args.look_weight * sum(looks)
        total.backward()
        norm = optimizer.step(step, rates_at(step, args))
        if loss is not None:
            marks, want = batch.marks[:, 1:], batch.tokens[:, 1:]
            words = want[marks >= 0] != batches.writer.ids["eot"]
            report.note(marks[marks >= 0][words], loss.detach()[words], right[words])
        line = report.line(step + 1, args.steps, [float(x.detach()) for x in (seen, *looks)], norm)
        if (step + 1) % 10 == 0:
            say(line, flush=True)
        if rank == 0 and ((step + 1) % args.save_every == 0 or step + 1 == args.seeing or step + 1 == args.steps):
            seconds = spent + time.time() - began
            part = kept.with_suffix(".part")
            torch.save({"optimizer": optimizer.state(), "step": step + 1, "seconds": seconds}, part)
            part.replace(kept)
            export(args.work / "export", learner, optimizer, tokenizer)
            say(f"saved at step {step + 1} after {seconds / 60:.1f} min", flush=True)


def export(folder: Path, learner: Learner, optimizer: Optimizer, tokenizer: PreTrainedTokenizerFast) -> None:
    """What plain transformers loads: the running mean of the weights, in bf16."""
    model = build_model(tokenizer)
    state = {
        n.removeprefix("model."): m
        for n, m in zip(optimizer.names, optimizer.mean, strict=True)
        if n.startswith("model.")
    }
    model.load_state_dict(state, strict=False)  # lm_head is the embedding
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of the checkpoints")
    parser.add_argument("--export", type=Path, help="where the finished model goes [WORK/export]")
    parser.add_argument("--steps", type=int, default=2600, help="updates in all [%(default)s]")
    parser.add_argument("--seeing", type=int, default=400, help="of which the tower alone [%(default)s]")
    parser.add_argument("--pictures", type=int, default=64, help="pictures per step for the tower alone [%(default)s]")
    parser.add_argument("--rows", type=int, default=24, help="conversations per step [%(default)s]")
    parser.add_argument("--length", type=int, default=320, help="their length in tokens [%(default)s]")
    parser.add_argument(
        "--long", type=int, default=2304, help="length of the long ones, one step in twelve later on [%(default)s]"
    )
    parser.add_argument(
        "--seen-weight", type=float, default=1.0, help="weight of the tower's own loss in conversations [%(default)s]"
    )
    parser.add_argument(
        "--look-weight", type=float, default=0.3, help="weight of where the words should look [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="[%(default)s]")
    parser.add_argument("--processes", type=int, default=2, help="that share a batch and the threads [%(default)s]")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints [%(default)s]")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "meet").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)
    if args.export:
        args.export.mkdir(parents=True, exist_ok=True)
        for file in (args.work / "export").iterdir():
            (args.export / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    main()
