"""One peer of `mmprefill bench prefill --against`, run by the interpreter of the peer's own environment.

Nothing of mmprefill is imported here, and nothing but the peer and Pillow has to be installed beside it. It speaks like
`bench_worker.py`: one line when it is loaded and warm, one for every "run", one for "quit".

vllm: prefix and encoder caches are on, and emptied before every repeat. openvino: continuous batching where the folder
is an export that OpenVINO GenAI takes (Qwen), else optimum-intel, one request at a time.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Run = Callable[[Rows], int]  # -> prompt tokens


def main(
    system: str, model: str, workload: str, variant: str, requests: str, dtype: str, threads: str, settings: str
) -> None:
    """Serve orders from standard input, one JSON line each; `settings` is JSON of the processor's."""
    rows = load_rows(Path(workload), variant, int(requests))
    run = {"vllm": vllm, "openvino": openvino}[system](model, dtype, int(threads), json.loads(settings))
    run(rows[:2])
    say({"ready": True})
    for order in sys.stdin:
        if order.strip() == "quit":
            break
        started = time.perf_counter()
        tokens = run(rows)
        say({"seconds": time.perf_counter() - started, "tokens": tokens, "requests": len(rows)})
    alone = []
    for row in rows[:4]:
        started = time.perf_counter()
        run([row])
        alone.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    say({"first_token_s": statistics.median(alone), "peak_rss_mb": peak})


def load_rows(folder: Path, variant: str, count: int) -> Rows:
    """Rows of a variant with their pictures decoded."""
    from PIL import Image

    rows = json.loads((folder / "workload.json").read_text())[variant][:count]
    return [{**row, "image": row["image"] and Image.open(folder / row["image"]).convert("RGB")} for row in rows]


def say(answer: dict[str, Any]) -> None:
    """One line for whoever asked."""
    print(json.dumps(answer), flush=True)


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One user turn: the picture, then the text."""
    picture = [{"type": "image"}] if row["image"] else []
    return [{"role": "user", "content": [*picture, {"type": "text", "text": row["text"]}]}]


def vllm(model: str, dtype: str, threads: int, settings: dict[str, Any]) -> Run:
    """vLLM on a CPU, in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    from transformers import AutoProcessor
    from vllm import LLM, SamplingParams

    processor: Any = AutoProcessor.from_pretrained(model)
    context = int(json.loads((Path(model) / "config.json").read_text())["text_config"]["max_position_embeddings"])
    engine: Any = LLM(
        model,
        dtype={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype],
        max_model_len=min(8192, context),
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        enforce_eager=True,
        enable_prefix_caching=True,
        mm_processor_cache_gb=1,
        limit_mm_per_prompt={"image": 1},
        mm_processor_kwargs=settings or None,
        disable_log_stats=True,
        seed=0,
    )
    one = SamplingParams(max_tokens=1, temperature=0)

    def request(row: dict[str, Any]) -> dict[str, Any]:
        prompt = {"prompt": processor.apply_chat_template(messages(row), add_generation_prompt=True)}
        return {**prompt, "multi_modal_data": {"image": row["image"]}} if row["image"] else prompt

    def run(rows: Rows) -> int:
        for owner in (engine, engine.llm_engine):
            for name in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
                getattr(owner, name, lambda: None)()
        outputs = engine.generate([request(row) for row in rows], one, use_tqdm=False)
        return sum(len(output.prompt_token_ids) for output in outputs)

    return run


def openvino(model: str, dtype: str, threads: int, settings: dict[str, Any]) -> Run:
    """OpenVINO on a folder that `optimum-cli export openvino` wrote."""
    hint = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}[dtype]
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
    if "qwen" in json.loads((Path(model) / "config.json").read_text())["model_type"]:
        assert not settings, "OpenVINO GenAI has a processor of its own, which takes no settings"
        return _continuous(model, options)
    from optimum.intel import OVModelForVisualCausalLM
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(model)
    for name, value in settings.items():
        setattr(processor.image_processor, name, value)
    loaded: Any = OVModelForVisualCausalLM.from_pretrained(
        str(Path(model).resolve()), device="CPU", ov_config={name: str(value) for name, value in options.items()}
    )

    def one(row: dict[str, Any]) -> int:
        text = processor.apply_chat_template(messages(row), add_generation_prompt=True)
        pictures = {"images": [[row["image"]]]} if row["image"] else {}
        inputs = processor(text=[text], return_tensors="pt", **pictures)
        loaded.generate(**inputs, max_new_tokens=1, do_sample=False)
        return int(inputs["attention_mask"].sum())

    return lambda rows: sum(map(one, rows))


def _continuous(model: str, options: dict[str, Any]) -> Run:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    config, scheduler = genai.GenerationConfig(), genai.SchedulerConfig()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = 1, False, False
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2, 2048, 32
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    pipe: Any = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)

    def prompt(row: dict[str, Any]) -> str:  # Qwen2.5-VL's template
        picture = "<|vision_start|><|image_pad|><|vision_end|>" if row["image"] else ""
        return f"<|im_start|>user\n{picture}{row['text']}<|im_end|>\n<|im_start|>assistant\n"

    def run(rows: Rows) -> int:
        images = [[ov.Tensor(np.asarray(row["image"], dtype=np.uint8)[None])] if row["image"] else [] for row in rows]
        outputs = pipe.generate(list(map(prompt, rows)), images=images, generation_config=[config] * len(rows))
        return sum(output.perf_metrics.get_num_input_tokens() for output in outputs)

    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
