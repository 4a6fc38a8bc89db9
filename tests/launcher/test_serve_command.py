"""Settings of a server: flags, file, environment. And the sockets that they ask for."""

import http.client
import os
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.launcher.errors import ConfigError
from lockstep.launcher.serve.app import create_app
from lockstep.launcher.serve.command import parse
from lockstep.launcher.serve.http_server import HttpServer
from lockstep.launcher.serve.listen import listening_socket, open_socket, url_of
from lockstep.launcher.serve.open_files import allow_many_files
from lockstep.launcher.serve.options import ServeOptions
from lockstep.launcher.serve.state import ServerState


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_API_KEY", raising=False)


def test_a_model_is_named_with_or_without_its_flag() -> None:
    assert parse(["m", "--port", "1"]).launch.model == parse(["--model", "m"]).launch.model == "m"
    assert parse(["m"]).options == ServeOptions()
    with pytest.raises(ConfigError, match="model is given twice: 'm' and --model"):
        parse(["m", "--model", "n"])
    with pytest.raises(ConfigError, match="model is required"):
        parse([])


def test_flags_stand_above_the_file_which_holds_settings_of_both_kinds(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "m"\nport = 1\nhost = "::1"\nmax-num-seqs = 3\napi-key = ["k"]\n')
    command = parse(["--config", str(file), "--port", "2"])
    assert (command.options.port, command.options.host) == (2, "::1")
    assert command.options.api_key == ("k",)
    assert (command.launch.model, command.launch.max_num_seqs) == ("m", 3)


def test_an_address_of_the_file_and_one_of_a_flag_exclude_each_other_too(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('uds = "s"\n')
    assert parse(["m", "--config", str(file)]).options.uds == "s"
    with pytest.raises(ConfigError, match="uds and port exclude each other"):
        parse(["m", "--config", str(file), "--port", "8000"])


def test_a_model_may_have_several_names(tmp_path: Path) -> None:
    assert parse(["m", "--served-model-name", "a", "b"]).launch.model_names == ("a", "b")
    assert parse(["m"]).launch.model_names == ("m",)
    file = tmp_path / "serve.toml"
    for line, names in (("'a'", ("a",)), ("['a', 'b']", ("a", "b"))):
        file.write_text(f"served-model-name = {line}")
        assert parse(["m", "--config", str(file)]).launch.model_names == names
    with pytest.raises(ConfigError, match="served_model_name"):
        parse(["m", "--served-model-name", ""])


def test_a_bad_setting_in_the_file_is_named_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    for line in ("port = 70000", "shutdown-timeout = 'long'", "prot = 1", "max-num-seqs = 0"):
        file.write_text(line)
        field = line.partition(" ")[0].replace("-", "_")
        with pytest.raises(ConfigError, match=f"--config {file}: .*{field}"):
            parse(["m", "--config", str(file)])


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_key must not be empty"):
        parse(["m", "--api-key", ""])


def test_keys_come_from_flags_or_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "from outside")
    assert parse(["m"]).options.api_key == ("from outside",)
    assert parse(["m", "--api-key", "a", "--api-key", "b"]).options.api_key == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "port"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout"),
        (["--max-queue-seconds", "0"], "max_queue_seconds must be above 0 and finite, got 0.0"),
        (["--max-queue-seconds", "inf"], "max_queue_seconds must be above 0 and finite, got inf"),
        (["--max-queue-seconds", "nan"], "max_queue_seconds must be above 0 and finite, got nan"),
        (["--ssl-keyfile", "k"], "ssl_keyfile and ssl_certfile must be given together"),
        (["--uds", ""], "uds must not be empty"),
        (["--uds", "s", "--port", "8000"], "uds and port exclude each other, got 's' and 8000"),
        (["--host", "h", "--uds", "s"], "uds and host exclude each other, got 's' and 'h'"),
        (["--otlp-traces-endpoint", "foo"], "must begin with http:// or https://, got 'foo'"),
        (["--portt", "1"], "unrecognized arguments: --portt 1"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
    ],
)
def test_bad_settings_are_named(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["m", *flags])


@contextmanager
def probes(options: ServeOptions) -> Iterator[socket.socket]:
    """The socket of a server that has no engine yet."""
    with listening_socket(options) as sock:
        server = HttpServer(create_app(ServerState(options)), sock, options)
        with server.running():
            yield sock


def health(connection: http.client.HTTPConnection, path: str = "/health") -> int:
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("prefix", ["/api", "api/"])
def test_behind_a_proxy_that_takes_a_prefix_off_or_leaves_it_probes_need_no_key(
    prefix: str,
) -> None:
    options = ServeOptions(host="127.0.0.1", port=0, root_path=prefix, api_key=("k",))
    with probes(options) as sock:
        paths = ("/health", "/api/health", "/other/health", "/api/v1/models")
        connections = [http.client.HTTPConnection(*sock.getsockname()) for _ in paths]
        found = [health(*each) for each in zip(connections, paths, strict=True)]
    assert found == [200, 200, 401, 401]


def test_a_unix_socket_replaces_the_one_of_a_server_before(tmp_path: Path) -> None:
    options = ServeOptions(uds=str(tmp_path / "s"))
    open_socket(options).close()
    with probes(options) as sock:
        assert url_of(sock, options) == f"unix:{options.uds}"
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(options.uds)
        assert health(connection) == 200
        with pytest.raises(ConfigError, match=f"cannot listen on {options.uds}: a server listens"):
            open_socket(options)
    assert not Path(options.uds).exists()


def test_the_unix_socket_of_another_server_is_left_alone(tmp_path: Path) -> None:
    options = ServeOptions(uds=str(tmp_path / "s"))
    with listening_socket(options):
        os.rename(options.uds, tmp_path / "old")
        other = open_socket(options)
    with other:
        assert Path(options.uds).is_socket()


def test_as_many_files_may_be_open_as_the_system_lets_us() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[1] == resource.RLIM_INFINITY or before[1] > 500
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        allowed = allow_many_files()
        assert allowed > 500 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == allowed
        assert allow_many_files() == allowed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_is_not_taken_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("words")
    with pytest.raises(ConfigError, match=f"cannot listen on {path}: what is there is no socket"):
        open_socket(ServeOptions(uds=str(path)))
    assert path.read_text() == "words"


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 203.0.113.7 port 0"):
        open_socket(ServeOptions(host="203.0.113.7", port=0))
    with pytest.raises(ConfigError, match="cannot listen on no.such.invalid port 0"):
        open_socket(ServeOptions(host="no.such.invalid", port=0))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, env=os.environ | {"RANDFILE": str(tmp_path / "r")},
    )  # fmt: skip
    options = ServeOptions(
        host="127.0.0.1", port=0, ssl_keyfile=str(key), ssl_certfile=str(certificate)
    )
    with probes(options) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock, options) == f"https://127.0.0.1:{port}"
        trust = ssl.create_default_context(cafile=str(certificate))
        assert health(http.client.HTTPSConnection("localhost", port, context=trust)) == 200


@pytest.mark.parametrize(
    ("key", "certificate", "said"),
    [
        ("none.pem", "words.pem", "^--ssl-keyfile .*none.pem: there is no such file$"),
        ("words.pem", "none.pem", "^--ssl-certfile .*none.pem: there is no such file$"),
        ("words.pem", "words.pem", "^ssl_keyfile and ssl_certfile: "),
    ],
)
def test_a_key_or_certificate_that_cannot_be_read_is_named(
    tmp_path: Path, key: str, certificate: str, said: str
) -> None:
    (tmp_path / "words.pem").write_text("words")
    files = {"ssl_keyfile": str(tmp_path / key), "ssl_certfile": str(tmp_path / certificate)}
    with pytest.raises(ConfigError, match=said):
        with probes(ServeOptions(port=0, **files)):
            pass
