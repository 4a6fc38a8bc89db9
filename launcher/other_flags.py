"""What to do with flags that vLLM or SGLang have and Lockstep has not."""

import re

from lockstep.comm.sampling import MAX_LOGPROBS

_COMPILATION = "--cudagraph-mode, --cudagraph-capture-sizes and --compile"
SAME = {
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--context-length": "--max-model-len",
    "--random-seed": "--seed",
    "--tp-size": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--dp": "--data-parallel-size",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-overlap-schedule": "--no-async-scheduling",
    "--disable-cuda-graph": "--enforce-eager",
    "--cuda-graph-bs": "--cudagraph-capture-sizes",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes",
    "--cuda-graph-max-bs": "--max-cudagraph-capture-size",
    "--enable-torch-compile": "--compile",
    "--disable-custom-all-reduce": "--all-reduce nccl",
    "--attention-config": "--attention-backend",
    "-ac": "--attention-backend",
    "--dist-timeout": "--distributed-timeout-seconds",
    "--compilation-config": _COMPILATION,
    "-cc": _COMPILATION,
    "-O.": _COMPILATION,
}
# Flags by the reason why nothing is lost without them.
_NEEDLESS = {
    "prompts are always cut to --max-num-batched-tokens": """
        --enable-chunked-prefill --no-enable-chunked-prefill --max-num-partial-prefills
        --max-long-partial-prefills --long-prefill-token-threshold""",
    "the KV cache has the type of --dtype": "--kv-cache-dtype --calculate-kv-scales",
    "requests are served first come, first served": "--scheduling-policy --schedule-policy",
    "code of a model is never run": "--trust-remote-code --code-revision",
    "models are Lockstep's own": "--model-impl",
    "models generate, and do nothing else": """
        --runner --convert --task --pooler-config --override-pooler-config""",
    "every model here is a dense decoder with attention": """
        --mamba-block-size --mamba-cache-dtype --mamba-ssm-cache-dtype
        --disable-hybrid-kv-cache-manager""",
    "attention is that of the model, windows included": """
        --disable-sliding-window --disable-cascade-attn""",
    "equal prefixes are found by BLAKE2": "--prefix-caching-hash-algo",
    "config.json or the GGUF file says what a model is": """
        --hf-overrides --hf-config-path --config-format""",
    "the tokenizer is the one of the model's files or of --tokenizer": """
        --tokenizer-mode --skip-tokenizer-init""",
    "each rank reads its own shards": """
        --max-parallel-loading-workers --model-loader-extra-config --safetensors-load-strategy
        --use-tqdm-on-load --ignore-patterns --pt-load-map-location""",
    "what is fetched lies where HF_HOME says": "--download-dir",
    "HF_TOKEN is the key to the hub": "--hf-token",
    "what a call does not set comes from the model's generation_config.json": """
        --generation-config --override-generation-config""",
    "a call may bring chat_template_kwargs": "--default-chat-template-kwargs",
    "a template comes from the model or --chat-template": "--trust-request-chat-template",
    "a message may be a text or a list of text parts": "--chat-template-content-format",
    "answers are the assistant's": "--response-role",
    f"a call may ask for {MAX_LOGPROBS} log-probabilities of a token": "--max-logprobs",
    "llguidance compiles every grammar": """
        --guided-decoding-backend --structured-outputs-config --grammar-backend""",
    "a stream has an event for each token": "--stream-interval",
    "an answer has its name in x-request-id": "--enable-request-id-headers",
    "/load always tells it": "--enable-server-load-tracking",
    "a call asks for usage in its stream_options": "--enable-force-include-usage",
    "a preempted request is computed anew": "--swap-space --preemption-mode",
    "a decode graph serves contexts of every length": "--max-seq-len-to-capture",
    "figures are at /metrics, not in the log": """
        --disable-log-stats --kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics""",
    "no metric is hidden": "--show-hidden-metrics-for-version",
    "requests are traced with --otlp-traces-endpoint": """
        --enable-log-requests --enable-log-outputs --collect-detailed-traces""",
    "requests are not in the log": """
        --disable-log-requests --max-log-len --disable-uvicorn-access-log
        --disable-access-log-for-endpoints""",
    "LOCKSTEP_LOG_LEVEL sets what is logged": "--uvicorn-log-level --log-level --log-config-file",
    "one process answers HTTP": "--api-server-count -asc",
    "--max-request-bytes bounds a call": "--h11-max-incomplete-event-size --h11-max-header-count",
    "there are no such pages": "--disable-fastapi-docs --enable-offline-docs",
    "'lockstep profile' measures a step": "--profiler-config",
    "CUDA_VISIBLE_DEVICES chooses": "--device-ids --base-gpu-id",
    "a rank that dies ends the server, and its supervisor starts it": "--enable-fault-tolerance",
    "--distributed-timeout-seconds bounds every wait": """
        --watchdog-config --watchdog-timeout --soft-watchdog-timeout""",
    "ranks come from Ray or torchrun, see docs/deploy.md": """
        --distributed-executor-backend --data-parallel-backend -dpb --data-parallel-size-local -dpl
        --data-parallel-address -dpa --data-parallel-rpc-port -dpp --data-parallel-rank -dpn
        --data-parallel-start-rank -dpr --data-parallel-hybrid-lb -dph --data-parallel-external-lb
        -dpe --nnodes -n --node-rank -r --master-addr --master-port --headless --use-ray""",
}
# Flags by what is not here, which nothing replaces.
_ABSENT = {
    "a model is split by --tensor-parallel-size alone": """
        --pipeline-parallel-size -pp --pp-size --decode-context-parallel-size -dcp
        --prefill-context-parallel-size -pcp""",
    "there are no mixtures of experts": """
        --enable-expert-parallel -ep --ep-size --enable-eplb --eplb-config --all2all-backend
        --expert-placement-strategy --moe-backend --enable-dbo""",
    "arithmetic is in --dtype, to which weights of a GGUF file are expanded": """
        --quantization -q --quantization-config""",
    "there are no LoRA adapters": """
        --enable-lora --lora-modules --lora-paths --max-loras --max-lora-rank --max-cpu-loras
        --lora-dtype --fully-sharded-loras --default-mm-loras --lora-target-modules""",
    "there is no speculative decoding": """
        --speculative-config -sc --speculative-model --speculative-algorithm
        --spec-method --spec-model --spec-tokens""",
    "tools are not supported": """
        --enable-auto-tool-choice --tool-call-parser --tool-parser-plugin --tool-server
        --exclude-tools-when-tool-choice-none""",
    "what a model thinks stays in the text of its answer": """
        --reasoning-parser --reasoning-parser-plugin --reasoning-config""",
    "models read text only": """
        --limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --mm-encoder-tp-mode
        --media-io-kwargs --allowed-local-media-path --allowed-media-domains
        --language-model-only --interleave-mm-strings --skip-mm-profiling""",
    "a prompt is text or token ids": "--enable-prompt-embeds",
    "usage counts tokens, without details": "--enable-prompt-tokens-details",
    "the hub's main revision is fetched, of another give its directory to --model": """
        --revision --tokenizer-revision""",
    "weights and KV blocks stay in the memory of their device": """
        --cpu-offload-gb --kv-offloading-size --kv-offloading-backend --enable-sleep-mode""",
    "KV blocks stay in their engine": """
        --kv-transfer-config --kv-events-config --ec-transfer-config""",
    "code from elsewhere is not loaded": """
        --middleware --logits-processors --worker-cls --worker-extension-cls --scheduler-cls
        --io-processor-plugin""",
    "TLS is --ssl-keyfile and --ssl-certfile, read once": """
        --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh""",
}


def _by_flag(reasons: dict[str, str]) -> dict[str, str]:
    return {flag: reason for reason, flags in reasons.items() for flag in flags.split()}


NEEDLESS = _by_flag(_NEEDLESS)
ABSENT = _by_flag(_ABSENT)
# Argparse takes the rest of -O.level=3 for the value of -O.
_UNKNOWN = re.compile(r"unrecognized arguments: (-[^\s=]+)|argument \S+/-O: .* '(\.[^\s=']*)")
_FLAG = re.compile(r"--(no-)?([a-z][a-z-]+)")


def advice(complaint: str) -> str | None:
    """What to write instead, if ``complaint`` is argparse's about such a flag."""
    found = _UNKNOWN.match(complaint)
    if found is None:
        return None
    flag = found[1] or f"-O{found[2]}"
    reason = _reason("-O." if found[2] else flag.partition(".")[0])
    return f"{flag} is not a flag here{reason}" if reason else None


def advice_on_setting(name: str) -> str | None:
    """As ``advice``, for the name of a setting in Python or in a file: ``enable_lora``."""
    reason = _reason("--" + name.replace("_", "-"))
    return f"{name} is not a setting here{_FLAG.sub(_as_setting, reason)}" if reason else None


def _reason(flag: str) -> str:
    if flag in SAME:
        return f": the same is set by {SAME[flag]}"
    if flag in NEEDLESS:
        return f", leave it out: {NEEDLESS[flag]}"
    return f": {ABSENT[flag]}" if flag in ABSENT else ""


def _as_setting(found: re.Match[str]) -> str:
    name = found[2].replace("-", "_")
    return f"{name}=False" if found[1] else name
