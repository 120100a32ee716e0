"""The typed face of the C++ extension."""

class ThreadPool:
    """Worker threads that keep their scratch between batches."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
