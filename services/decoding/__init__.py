"""Files of clients to pixels and samples, in processes that may crash, hang or run out of memory alone. No torch."""
