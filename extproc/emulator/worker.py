"""The command line of ``extproc worker``: vLLM's option names where vLLM has them."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import fields

import uvloop

from extproc.emulator.engine import CostModel, EngineConfig
from extproc.emulator.worker_http import Worker, WorkerConfig

_COST_HELP = {
    "step_s": "every engine step",
    "prefill_s": "each prompt token computed",
    "decode_s": "each sequence decoding in a step",
    "request_s": "each request, before the engine sees it",
    "tokenize_s": "each prompt token, before the engine sees it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on, 0 for any free one (default: %(default)s)")
    add(
        "--model",
        "--served-model-name",
        dest="model",
        nargs="+",
        default=["emulated"],
        metavar="NAME",
        help="model name, then further names (LoRA adapters), which share no cache (default: emulated)",
    )
    add("--speedup", type=_positive, default=1.0, help="run so many times faster than real time")
    add("--kv-cache-tokens", type=int, default=190_000, help="what the KV cache holds (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens a block (default: %(default)s)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep blocks for later prompts that begin alike",
    )
    add("--max-num-seqs", type=int, default=256, help="sequences running at once (default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens a step (default: %(default)s)")
    add(
        "--max-num-queued-reqs",
        type=int,
        default=None,
        help="waiting requests beyond which 503 is the answer",
    )
    add(
        "--max-model-len", type=int, default=131_072, help="prompt and output together (default: %(default)s)"
    )
    add("--stream-interval", type=int, default=1, help="tokens a streamed chunk (default: %(default)s)")
    add(
        "--default-output-tokens",
        type=int,
        default=128,
        help="length of an answer without max_tokens (default: %(default)s)",
    )
    add(
        "--enable-prompt-tokens-details",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="report cached tokens in usage; unlike in vLLM on by default",
    )
    add("--report-version", default="0.32.0", help="what /version says (default: %(default)s)")
    add("--enable-request-id-headers", action="store_true", help="send X-Request-Id back")
    add(
        "--shutdown-timeout",
        type=float,
        default=20.0,
        metavar="S",
        help="how long SIGTERM waits for running requests (default: %(default)s)",
    )
    costs = parser.add_argument_group("cost model, in model seconds")
    for field in fields(CostModel):
        costs.add_argument(
            "--" + field.name.replace("_", "-"),
            type=float,
            default=field.default,
            metavar="S",
            help=f"{_COST_HELP[field.name]} (default: %(default)s)",
        )


def configuration(args: argparse.Namespace) -> WorkerConfig:
    """The parsed options as a configuration."""
    engine = EngineConfig(
        block_size=args.block_size,
        # One block is a placeholder.
        num_gpu_blocks=args.kv_cache_tokens // args.block_size + 1,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        max_queued=args.max_num_queued_reqs,
        enable_prefix_caching=args.enable_prefix_caching,
        cost=CostModel(**{field.name: getattr(args, field.name) for field in fields(CostModel)}),
    )
    return WorkerConfig(
        engine=engine,
        host=args.host,
        port=args.port,
        model_names=tuple(args.model),
        speedup=args.speedup,
        stream_interval=args.stream_interval,
        default_output_tokens=args.default_output_tokens,
        prompt_tokens_details=args.enable_prompt_tokens_details,
        request_id_headers=args.enable_request_id_headers,
        version=args.report_version,
        shutdown_timeout_s=args.shutdown_timeout,
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 1 when the port can't be had or the engine crashed."""
    return uvloop.run(_serve(configuration(args)))


async def _serve(config: WorkerConfig) -> int:
    worker = Worker(config)
    try:
        await worker.start()
    except OSError as error:
        message = f"extproc worker: --host {config.host} --port {config.port}: {error.strerror or error}"
        print(message + "; choose another port, or 0 for any free one", file=sys.stderr)
        return 1
    print(f"emulated vLLM worker on http://{worker.address}, model {config.model_names[0]}", flush=True)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (asked, worker.stopped)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if asked.is_set():
        await worker.drain()
    await worker.stop()
    for wait in waits:
        wait.cancel()
    return 0 if asked.is_set() else 1


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
