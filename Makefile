# SPDX-License-Identifier: Apache-2.0
.PHONY: default install demo test test-agents test-clients test-py test-cpp fuzz lint fmt serve bench clean
default: lint test-py

install:
	@scripts/install

demo: install
	@scripts/demo

test: install
	@scripts/services
	@scripts/lint
	@scripts/test-cpp
	@scripts/test-py

test-agents: install
	@scripts/agents
	@MOORAGE_AGENTS_DIR=$${MOORAGE_AGENTS_DIR:-.agents} .venv/bin/python -m pytest -q tests/agents

test-clients: install
	@scripts/clients

test-py: install
	@scripts/test-py

test-cpp: install
	@scripts/test-cpp

lint: install
	@scripts/lint

fmt: install
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix .

serve: install
	@.venv/bin/moorage serve

bench: install
	@scripts/bench

clean:
	rm -rf .venv build

fuzz: install
	@scripts/fuzz
