"""One writer, many readers, one ring of records in shared memory.

The memory comes from memfd_create and has no name: it is gone with the last process that maps it.
Peers of the same user and pid namespace open it through the owner's /proc entry.

    words   [_READERS + _READER_WORDS * num_readers] uint64
            head (bytes written so far), records written, writer pid, closed;
            per reader: tail (bytes read so far), records read, pid
    data    [capacity_bytes] uint8; a record is (length, crc32, number) and its bytes, padded to
            16; records wrap around the end

Only the writer stores head, only reader i stores its tail, and both move after the bytes they
speak of. Where the processor may show them the other way round, the checksum of the record tells.
"""

import mmap
import os
import struct
import time
import zlib
from fcntl import F_ADD_SEALS, fcntl
from typing import Self

import msgspec

from lockstep.comm.errors import CommError, CommTimeout, WireError
from lockstep.comm.process import StopClock, process_gone

_HEAD, _RECORDS, _WRITER_PID, _CLOSED, _READERS = 0, 1, 2, 3, 8
_TAIL, _READ, _READER_PID, _READER_WORDS = 0, 1, 2, 8
_RECORD = struct.Struct("<IIQ")
_F_SEAL_SHRINK_AND_GROW = 0x2 | 0x4

_SPIN_S = 80e-6
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 2e-3
_LIVENESS_CHECK_S = 0.2
_VISIBILITY_S = 0.5
STOPPED_S = 5.0


# Producer: the process that creates the ring. Consumers: its writer and readers.
class RingAddress(msgspec.Struct, frozen=True, tag="ring"):
    """Where a ring lies: descriptor ``fd`` of process ``pid``, while that process holds it."""

    pid: int
    fd: int
    capacity_bytes: int
    num_readers: int


class Ring:
    """Owner of a ring's memory. Keep it open until the writer and all readers have attached."""

    def __init__(self, address: RingAddress) -> None:
        self.address = address
        self._open = True

    @classmethod
    def create(cls, *, num_readers: int, capacity_bytes: int) -> Self:
        """Make an empty ring.

        Raises:
            ValueError: no reader, or a capacity that holds no record.
        """
        if num_readers < 1:
            raise ValueError(f"num_readers must be at least 1, got {num_readers}")
        if capacity_bytes < 2 * _RECORD.size:
            raise ValueError(
                f"capacity_bytes must be at least {2 * _RECORD.size}, got {capacity_bytes}"
            )
        capacity = _padded(capacity_bytes)
        fd = os.memfd_create("lockstep-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, _num_words(num_readers) * 8 + capacity)
        fcntl(fd, F_ADD_SEALS, _F_SEAL_SHRINK_AND_GROW)
        return cls(RingAddress(os.getpid(), fd, capacity, num_readers))

    def close(self) -> None:
        """Give up the descriptor. Those who have attached keep the memory."""
        if self._open:
            self._open = False
            os.close(self.address.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Mapping:
    """The ring's memory as seen by one process."""

    def __init__(self, ring: Ring | RingAddress) -> None:
        self.address = ring.address if isinstance(ring, Ring) else ring
        self._map = _attach(self.address)
        view = memoryview(self._map)
        num_bytes = _num_words(self.address.num_readers) * 8
        self._words = view[:num_bytes].cast("Q")
        self._data = view[num_bytes:]
        self._capacity = self.address.capacity_bytes
        self._next_check = time.monotonic() + _LIVENESS_CHECK_S

    def _liveness_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + _LIVENESS_CHECK_S
        return True

    def _unmap(self) -> None:
        self._words.release()
        self._data.release()
        self._map.close()

    def _reader_base(self, index: int) -> int:
        return _READERS + _READER_WORDS * index


class RingWriter(_Mapping):
    """The one writer of a ring."""

    def __init__(self, ring: Ring | RingAddress) -> None:
        super().__init__(ring)
        self._head = self._words[_HEAD]
        self._records = self._words[_RECORDS]
        self._words[_WRITER_PID] = os.getpid()
        self._tails = [
            self._reader_base(index) + _TAIL for index in range(self.address.num_readers)
        ]

    def write(self, data: bytes, timeout_s: float = 10.0) -> None:
        """Append one record for all readers.

        Raises:
            ValueError: the record can never fit.
            CommTimeout: a reader made no room in time, or its process is gone; it is named.
        """
        size = _padded(_RECORD.size + len(data))
        if size > self._capacity:
            limit = self._capacity - _RECORD.size
            raise ValueError(f"a record holds at most {limit} bytes, got {len(data)}")
        if self._free() < size:
            self._wait_for_room(size, timeout_s)
        header = _RECORD.pack(len(data), zlib.crc32(data), self._records)
        self._put(header + data)
        self._head += size
        self._records += 1
        self._words[_RECORDS] = self._records
        self._words[_HEAD] = self._head

    def lag(self) -> dict[int, int]:
        """Records not read yet, by reader index."""
        words = self._words
        return {
            index: self._records - words[self._reader_base(index) + _READ]
            for index in range(self.address.num_readers)
        }

    def close(self) -> None:
        """Tell the readers that nothing more comes, and detach."""
        if not self._map.closed:
            self._words[_CLOSED] = 1
            self._unmap()

    def _free(self) -> int:
        words = self._words
        return self._capacity - self._head + min(words[tail] for tail in self._tails)

    def _put(self, record: bytes) -> None:
        start = self._head % self._capacity
        first = min(len(record), self._capacity - start)
        self._data[start : start + first] = record[:first]
        if first < len(record):
            self._data[: len(record) - first] = record[first:]

    def _wait_for_room(self, size: int, timeout_s: float) -> None:
        backoff = _Backoff(timeout_s, spin_s=0.0)
        while self._free() < size:
            if self._liveness_due() and self._slowest_is_gone():
                raise CommTimeout(f"{self._slowest()} will not read again: its process is gone")
            if not backoff.pause():
                raise CommTimeout(f"{self._slowest()} made no room for {timeout_s:g} s")

    def _slowest_index(self) -> int:
        words = self._words
        return min(range(len(self._tails)), key=lambda index: words[self._tails[index]])

    def _slowest_is_gone(self) -> bool:
        pid = self._words[self._reader_base(self._slowest_index()) + _READER_PID]
        return pid != 0 and process_gone(pid)

    def _slowest(self) -> str:
        index = self._slowest_index()
        pid = self._words[self._reader_base(index) + _READER_PID]
        who = f"pid {pid}" if pid else "never attached"
        return f"ring reader {index} ({who}, {self.lag()[index]} records behind)"


class RingReader(_Mapping):
    """Reader ``index`` of a ring. It spins only shortly after a record, then sleeps."""

    def __init__(self, ring: Ring | RingAddress, index: int) -> None:
        super().__init__(ring)
        if not 0 <= index < self.address.num_readers:
            limit = self.address.num_readers
            raise ValueError(f"reader index must be in [0, {limit}), got {index}")
        self.index = index
        base = self._reader_base(index)
        self._tail_word, self._read_word = base + _TAIL, base + _READ
        self._tail = self._words[self._tail_word]
        self._read = self._words[self._read_word]
        self._words[base + _READER_PID] = os.getpid()
        self._stop_clock = StopClock()

    def poll(self) -> bytes | None:
        """The next record, or None at once if there is none. Raises WireError on damage."""
        if self._words[_HEAD] == self._tail:
            return None
        data = self._take()
        self._read += 1
        self._tail += _padded(_RECORD.size + len(data))
        self._words[self._read_word] = self._read
        self._words[self._tail_word] = self._tail
        return data

    def read(self, timeout_s: float) -> bytes | None:
        """The next record, or None after ``timeout_s``.

        Raises:
            CommError: everything is read and the writer has closed the ring, is gone, or has been
                stopped for ``STOPPED_S``.
            WireError: the ring's memory is damaged.
        """
        data = self.poll()
        if data is not None:
            return data
        backoff = _Backoff(timeout_s, spin_s=_SPIN_S)
        while data is None:
            if self._liveness_due():
                self._check_writer()
            if not backoff.pause():
                return self.poll()
            data = self.poll()
        return data

    def close(self) -> None:
        """Detach. What this reader has not read keeps its room."""
        if not self._map.closed:
            self._unmap()

    def _check_writer(self) -> None:
        pid = self._words[_WRITER_PID]
        closed = self._words[_CLOSED] == 1
        gone = pid != 0 and process_gone(pid)
        if (closed or gone) and self._words[_HEAD] == self._tail:
            how = "has closed the ring" if closed else "is gone"
            raise CommError(f"the writer (pid {pid}) {how}")
        if self._stop_clock.look(pid) > STOPPED_S:
            raise CommError(f"the writer (pid {pid}) hangs: stopped for {STOPPED_S:g} s")

    def _take(self) -> bytes:
        data = self._record()
        if data is None:
            data = self._record_once_visible()
        return data

    def _record(self) -> bytes | None:
        header = self._bytes(self._tail, _RECORD.size)
        length, checksum, number = _RECORD.unpack(header)
        if number != self._read or length > self._capacity - _RECORD.size:
            return None
        data = self._bytes(self._tail + _RECORD.size, length)
        return data if zlib.crc32(data) == checksum else None

    def _record_once_visible(self) -> bytes:
        deadline = time.monotonic() + _VISIBILITY_S
        while time.monotonic() < deadline:
            data = self._record()
            if data is not None:
                return data
        raise WireError(f"record {self._read} of the ring is damaged")

    def _bytes(self, start: int, length: int) -> bytes:
        start %= self._capacity
        end = start + length
        if end <= self._capacity:
            return bytes(self._data[start:end])
        return bytes(self._data[start:]) + bytes(self._data[: end - self._capacity])


class _Backoff:
    """Waiting with a deadline: spin for ``spin_s``, then sleep an eighth of the time waited."""

    def __init__(self, timeout_s: float, *, spin_s: float) -> None:
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._spin_s = spin_s

    def pause(self) -> bool:
        """False once the deadline has passed."""
        waited = time.monotonic() - self._start
        left = self._timeout_s - waited
        if left <= 0:
            return False
        if waited >= self._spin_s:
            time.sleep(min(left, _LONGEST_SLEEP_S, max(_FIRST_SLEEP_S, waited / 8)))
        return True


def _padded(num_bytes: int) -> int:
    return (num_bytes + 15) & ~15


def _num_words(num_readers: int) -> int:
    return _READERS + _READER_WORDS * num_readers


def _attach(address: RingAddress) -> mmap.mmap:
    try:
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CommError(f"the ring of process {address.pid} cannot be opened: {error}") from error
    try:
        length = _num_words(address.num_readers) * 8 + address.capacity_bytes
        return mmap.mmap(fd, length)
    finally:
        os.close(fd)
