import json
from importlib import metadata

from pydantic import BaseModel, SecretStr

from shared.environment import (
    chosen_variables,
    environment_of,
    hide_accounts,
    package_versions,
    without_secrets,
)


class Server(BaseModel):
    token: SecretStr | None = SecretStr("hush-1")
    url: str = "http://user:hush-2@host:1"


class Settings(BaseModel):
    redis_url: str = "redis://:hush-3@broker:6379/0"
    api_key: str = "hush-4"
    max_tokens: int = 7
    tokenizer: str = "path/of/it"
    server: Server = Server()
    extra_arguments: tuple[str, ...] = (
        *("--api-key", "hush-5", "--admin-token=hush-6", "--max-total-tokens", "9", "--tp", "2"),
    )


def test_settings_come_without_their_secrets() -> None:
    found = without_secrets(Settings().model_dump(mode="json"))
    assert "hush" not in json.dumps(found)
    assert found["redis_url"] == "redis://***@broker:6379/0"
    assert found["server"]["url"] == "http://***@host:1"
    assert (found["max_tokens"], found["tokenizer"]) == (7, "path/of/it")
    assert found["extra_arguments"] == [
        *("--api-key", "***", "--admin-token=***", "--max-total-tokens", "9", "--tp", "2"),
    ]


def test_variables_are_chosen_by_name_and_none_of_them_is_a_secret() -> None:
    given = {
        "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "HF_TOKEN": "hush",
        "ROLLOUT_SGLANG__TOKEN": "hush",
        "TRAINER_REDIS_URL": "redis://:hush@broker/0",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "TANDEM_PASSWORD": "hush",
    }
    assert chosen_variables(given) == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "TRAINER_REDIS_URL": "redis://***@broker/0",
    }


def test_an_address_without_an_account_stays() -> None:
    assert hide_accounts("http://host:80/a@b") == "http://host:80/a@b"


def test_versions_are_those_that_are_installed() -> None:
    found = package_versions()
    assert found["pydantic"] == metadata.version("pydantic")
    assert "no-such-package" not in found


def test_the_whole_is_json_and_says_where_it_runs() -> None:
    found = json.loads(json.dumps(environment_of(Settings())))
    assert found.keys() == {"python", "packages", "commit", "machine", "variables", "settings"}
    assert found["machine"]["cores"] > 0
    assert "hush" not in json.dumps(found)
