"""That this file is here puts tests/ on the path of the tests in folders below it, which share its helpers."""
