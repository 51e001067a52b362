"""Numbers with a range: jsonargparse checks them when it parses; to a type checker they are plain numbers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    PositiveInt = int
    NonNegativeInt = int
    NonNegativeFloat = float
    PositiveFloat = float
    UnitFloat = float
else:
    from jsonargparse.typing import ClosedUnitInterval as UnitFloat
    from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

__all__ = ["NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt", "UnitFloat"]
