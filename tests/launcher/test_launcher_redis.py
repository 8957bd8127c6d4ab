"""The private Redis as a thing that is killed, paused and started again."""

import redis
from process_waiting import wait_until

from quire.launcher.redis import EmbeddedRedis


def test_with_a_file_it_comes_back_with_what_it_held(tmp_path):
    with EmbeddedRedis(tmp_path, appendonly=True) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
            before = client.info()["run_id"]
        server.kill()
        wait_until(lambda: not server.is_alive, "the end")
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"
            assert client.info()["run_id"] != before
            assert client.config_get("appendfsync") == {"appendfsync": "everysec"}


def test_without_a_file_it_comes_back_empty(tmp_path):
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        server.restart()
        server.start()
        assert client.dbsize() == 0


def test_paused_it_does_not_answer_and_goes_on_later(tmp_path):
    with EmbeddedRedis(tmp_path) as server:
        server.pause()
        with redis.Redis.from_url(server.url, socket_timeout=0.1) as client:
            try:
                client.ping()
            except redis.TimeoutError:
                pass
            else:
                raise AssertionError("answered")
        server.resume()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_stopping_one_that_was_never_started_is_nothing(tmp_path):
    EmbeddedRedis(tmp_path).stop()
