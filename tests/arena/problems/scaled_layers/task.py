from dataclasses import dataclass


@dataclass
class Config:
    width: int
    kind: str
    factor: float
