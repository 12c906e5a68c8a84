"""C++ that is compiled where it runs. Knows nothing of what it compiles: sources lie with the packages that call them."""
