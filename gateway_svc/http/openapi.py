"""The OpenAPI description of request bodies, which the routes read themselves."""

from typing import Any

from fastapi import FastAPI

from gateway_svc.http.bodies.fields import HttpRequest

_REF = "#/components/schemas/{model}"


def documented(kind: type[HttpRequest]) -> dict[str, Any]:
    """The part of a route's description that names its body."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(app: FastAPI, kinds: tuple[type[HttpRequest], ...]) -> None:
    """Make the description of `app` contain the schemas of these bodies."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        description = describe()
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        for kind in kinds:
            schema = kind.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        return description

    app.openapi = openapi  # type: ignore[method-assign]
