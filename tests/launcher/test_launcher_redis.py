"""The private Redis is killed, paused and restarted."""

import redis
from process_waiting import wait_until

from quire.launcher.redis import EmbeddedRedis


def test_with_a_file_data_survives_a_restart(tmp_path):
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
            [size] = client.config_get("auto-aof-rewrite-min-size").values()
            assert int(size) == 16 << 20


def test_without_a_file_data_is_lost_at_a_restart(tmp_path):
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        server.restart()
        server.start()
        assert client.dbsize() == 0


def test_a_paused_redis_does_not_respond_until_it_is_resumed(tmp_path):
    with EmbeddedRedis(tmp_path) as server:
        server.pause()
        with redis.Redis.from_url(server.url, socket_timeout=0.1) as client:
            try:
                client.ping()
            except redis.TimeoutError:
                pass
            else:
                raise AssertionError("responded")
        server.resume()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_stop_before_the_first_start_does_nothing(tmp_path):
    EmbeddedRedis(tmp_path).stop()
