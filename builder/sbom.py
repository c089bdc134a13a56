"""A software bill of materials of an engine: CycloneDX 1.6, the same bytes for the same build."""

import json
import uuid
from pathlib import Path
from typing import Any

from trtc.protos.manifest import SBOM_FILE, ModelFacts, Provenance, TargetFacts

_NAMESPACE = uuid.UUID("6f2c1a3e-0c8e-5c51-9b1d-3f1f0e6f7a52")
"""Of trtc's serial numbers, which are made from the content (RFC 9562, version 5)."""


def write_sbom(
    engine: Path, model: ModelFacts, target: TargetFacts, provenance: Provenance
) -> None:
    """Write the bill of materials into an engine directory."""
    (engine / SBOM_FILE).write_text(sbom_json(model, target, provenance), encoding="utf-8")


def sbom_json(model: ModelFacts, target: TargetFacts, provenance: Provenance) -> str:
    """The engine as a machine-learning model, the checkpoint's files and the packages that made it.

    The document has no timestamp, and its serial number follows from its content.
    """
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL

    engine = Component(
        name=model.name,
        version=model.revision,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="engine",
        properties=[
            Property(name="trtc:architecture", value=model.architecture),
            Property(name="trtc:target", value=target.name),
            Property(name="trtc:toolchain", value=target.toolchain),
            *(
                Property(name=f"trtc:option:{name}", value=value)
                for name, value in sorted(provenance.options.items())
            ),
        ],
    )
    files = [
        Component(
            name=name,
            type=ComponentType.FILE,
            bom_ref=f"checkpoint/{name}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        )
        for name, digest in provenance.checkpoint.items()
    ]
    packages = [
        Component(
            name=name,
            version=version,
            type=ComponentType.PLATFORM if name == "python" else ComponentType.LIBRARY,
            bom_ref=f"package/{name}",
            purl=None if name == "python" else PackageURL("pypi", name=name, version=version),
        )
        for name, version in provenance.packages.items()
    ]
    bom = Bom(metadata=BomMetaData(component=engine), components=[*files, *packages])
    bom.register_dependency(engine, [*files, *packages])
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string()
    return _repeatable(json.loads(text))


def _repeatable(document: dict[str, Any]) -> str:
    """The document without its time, and with a serial number made from the rest."""
    del document["metadata"]["timestamp"], document["serialNumber"]
    content = json.dumps(document, sort_keys=True)
    serial = uuid.uuid5(_NAMESPACE, content)
    return json.dumps({**document, "serialNumber": f"urn:uuid:{serial}"}, indent=1, sort_keys=True)
