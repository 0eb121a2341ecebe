.PHONY: check lint types test

check: lint types test

lint:
	ruff check .

types:
	mypy

test:
	pytest -q
