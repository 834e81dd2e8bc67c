# SPDX-License-Identifier: Apache-2.0
"""Values with bounds that bodies of every API share, as annotated types.

Does not know: any body.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_STOPS = 16

Temperature = Annotated[float, Field(ge=0.0, le=10.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
INT32_MAX = 2**31 - 1
TopK = Annotated[int, Field(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10.0)]  # less, and logits overflow
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
PositiveInt = Annotated[int, Field(ge=1, le=INT32_MAX)]
Milliseconds = Annotated[int, Field(ge=1, lt=2**53)]
StopList = str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None
